"""Recipes: quantize, evaluate and measure, written down in one YAML file.

Here outside data enters, so every key and value is validated and unknown keys are refused. The
sections hold the options of the verbs under the verbs' own names. Torch-free.
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from qinfer.errors import ConfigError
from qinfer.schemes import parse_kv_dtype

SUFFIXES = {".yaml", ".yml"}
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class QuantizeSection(_Section):
    """Options of `qinfer quantize`; unset ones keep that verb's defaults."""

    weights: Literal["int2", "int3", "int4", "int8"] = "int4"
    algorithm: Literal["gptq", "rtn", "bnb-nf4", "bnb-int8"] = "gptq"
    group_size: int | Literal["auto"] = "auto"
    asym: bool = False
    act_order: bool = True
    damp_percent: float | None = None
    scale_search: Literal["absmax", "mse", "hessian"] | None = None
    gptaq: bool | None = None
    gptaq_samples: Count | None = None
    target_bits: float | None = None
    target_size: int | None = None
    format: Literal["gptq", "compressed-tensors"] = "gptq"
    input_activations: Literal["none", "int8"] = "none"
    condition_kv: Literal["auto", "on", "off"] = "auto"
    calibration: str | None = None
    num_samples: Count | None = None
    seq_len: Count | None = None
    overrides: tuple[str, ...] = Field(default=(), strict=False)
    kv_cache_dtype: Literal["int8", "fp8_e4m3", "fp8", "none"] = "int8"
    on_misfit: Literal["error", "skip"] = "error"
    strict: bool = False


class EvalSection(_Section):
    """Options of `qinfer eval`: KV types, windows and the limits that the result must keep."""

    kv_cache_dtypes: tuple[str, ...] = Field(default=("auto",), min_length=1, strict=False)
    baseline_kv_cache_dtype: str = "auto"
    baseline_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    text: str | None = None
    window: Annotated[int, Field(ge=2)] = 512
    stride: Count | None = None
    num_windows: Count | None = 16
    max_drift: float | None = None
    max_kld: Annotated[float, Field(ge=0)] | None = None

    @field_validator("kv_cache_dtypes", "baseline_kv_cache_dtype")
    @classmethod
    def _known_kv_dtypes(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        for name in (value,) if isinstance(value, str) else value:
            if name != "auto":
                try:
                    parse_kv_dtype(name)
                except ConfigError as error:
                    raise ValueError(str(error)) from error
        return value


class BenchSection(_Section):
    """Options of `qinfer bench`."""

    input_len: Count = 128
    output_len: Annotated[int, Field(ge=2)] = 32
    concurrency: tuple[Count, ...] = Field(default=(1, 4), min_length=1, strict=False)
    num_requests: Count | None = None


class Recipe(_Section):
    """One intent: a class of models on a class of machines.

    Args:
        name: short; the file is called `<name>.yaml`.
        description: for whom it is, in a sentence.
        model: the model that it was written for: directory, hub id or `.gguf` file.
        quantize: how to quantize.
        eval: how to measure quality, and its limits.
        bench: how to measure speed.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    description: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    quantize: QuantizeSection = QuantizeSection()
    eval: EvalSection = EvalSection()
    bench: BenchSection = BenchSection()


def load_recipe(recipe: str | Path) -> Recipe:
    """Read a recipe by its name (one that ships with qinfer) or by the path of a YAML file.

    Raises:
        ConfigError: there is no such recipe, or the file does not hold one; the message names
            the file and every offending key.
    """
    path = find_recipe(recipe)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path} is no mapping of keys to values")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise ConfigError(f"recipe {path}: {problems}") from error


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe given by name or path.

    Raises:
        ConfigError: there is none; the message lists the names that ship.
    """
    path = Path(recipe)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {path}")
        return path
    shipped = shipped_recipes()
    if str(recipe) not in shipped:
        known = ", ".join(shipped) or "none"
        raise ConfigError(
            f"there is no recipe {str(recipe)!r}; give a .yaml file or one of: {known}"
        )
    return shipped[str(recipe)]


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that ship with qinfer: name to file, sorted by name."""
    package = Path(__file__).parent
    checkout = package.parent
    # A wheel carries the folder inside the package; a checkout keeps it beside the package.
    folders = [package / "recipes"]
    if (checkout / "pyproject.toml").is_file():
        folders.append(checkout / "recipes")
    files = [file for folder in folders for file in folder.glob("*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}
