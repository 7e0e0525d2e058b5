"""API keys: who may call. Without a key of the list everything is refused but a few open paths.

Keys are read from a file or the environment, never from the command line, where every user of the
machine could see them. Only their digests are kept, so that neither a log nor a traceback can show
a key, and a comparison takes the same time whatever was sent.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.errors import ConfigError
from qinfer.server.errors import CLIENT_ERROR, error_body
from qinfer.server.observer import record_of
from qinfer.server.page import ASSET_PREFIX

SHORT_KEY_CHARS = 16  # keys below are accepted, with a warning: they can be guessed
# What load balancers and browsers ask for before anybody could have given them a key. The page
# holds no data; all that it shows comes from routes that want one.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/"})

_KEY = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without the key.

    Args:
        name: shown in logs: as given, else `key-` and the start of the digest.
        digest: SHA-256 of the key.
        short: it has fewer than `SHORT_KEY_CHARS` characters.
    """

    name: str
    digest: bytes
    short: bool = False


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that open the server."""

    keys: tuple[ApiKey, ...]

    def find(self, key: str) -> ApiKey | None:
        """Return the entry of a key; every entry is compared, so that time tells nothing."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for entry in self.keys:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found


def parse_keys(lines: Iterable[str], source: str) -> KeyRing:
    """Return the keys of lines such as `KEY` or `NAME KEY`; `#` begins a comment line.

    Args:
        lines: the text.
        source: what errors call it; they give numbers of lines, never what stands there.

    Raises:
        ConfigError: a line that is no key, one given twice, or no key at all.
    """
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        entry = _parse_key(words, f"{source}, line {number}")
        if entry.digest in keys or entry.name in names:
            raise ConfigError(f"{source}, line {number}: this key, or its name, stood before")
        keys[entry.digest] = entry
        names.add(entry.name)
    if not keys:
        raise ConfigError(f"{source} holds no API key; write at least one, or leave it out")
    return KeyRing(tuple(keys.values()))


def read_keys(path: Path) -> KeyRing:
    """Return the keys of a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API keys in {path} cannot be read: {error}") from error
    return parse_keys(text.splitlines(), str(path))


def readable_by_others(path: Path) -> bool:
    """Tell whether other users of the machine may read a file."""
    return bool(path.stat().st_mode & 0o044)


def _parse_key(words: Sequence[str], place: str) -> ApiKey:
    key = words[-1]
    if len(words) > 2 or not _KEY.fullmatch(key):
        raise ConfigError(f"{place}: write KEY, or NAME KEY, in printable ASCII")
    digest = hashlib.sha256(key.encode()).digest()
    name = words[0] if len(words) == 2 else f"key-{digest.hex()[:8]}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: the key's name may hold letters, digits and ._@- only")
    return ApiKey(name, digest, short=len(key) < SHORT_KEY_CHARS)


@dataclass(frozen=True, slots=True)
class RequireKey:
    """ASGI middleware that lets requests with a known key pass, and answers 401 to all others.

    It stands before the routes and knows none of them, so that a route added later is closed.
    """

    app: ASGIApp
    keys: KeyRing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or is_open(scope):
            await self.app(scope, receive, send)
            return
        token = _bearer(scope)
        entry = None if token is None else self.keys.find(token)
        if entry is None:
            message = (
                "this server needs an API key: send the header `Authorization: Bearer KEY`"
                if token is None
                else "the API key is not known here"
            )
            body = error_body(message, kind=CLIENT_ERROR, code="invalid_api_key")
            headers = {"WWW-Authenticate": 'Bearer realm="qinfer"'}
            await JSONResponse(body, status_code=401, headers=headers)(scope, receive, send)
            return
        record_of(scope).key = entry.name
        await self.app(scope, receive, send)


def is_open(scope: Scope) -> bool:
    """Tell whether a path needs no key."""
    path: str = scope["path"]
    return scope["type"] == "http" and (
        path in OPEN_PATHS or (path.startswith(ASSET_PREFIX) and ".." not in path)
    )


def _bearer(scope: Scope) -> str | None:
    """Return the token of the Authorization header; None if there is none, or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    kind, _, token = values[0].decode("latin-1").strip().partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None
