"""`qinfer inspect`: what a checkpoint is, from its files' headers and settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qinfer.checkpoint.describe import Description, Part, describe
from qinfer.checkpoint.hub import resolve_model
from qinfer.checkpoint.reader import Checkpoint, open_checkpoint
from qinfer.cli import console
from qinfer.errors import QinferError
from qinfer.formats.kv_scales import parse_kv_scheme
from qinfer.kvcache.layout import KVLayout
from qinfer.models.config import ModelConfig, MoEConfig
from qinfer.models.tokenizer import load_tokenizer
from qinfer.schemes import KVScheme, parse_kv_dtype

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that the verb tells.

    Args:
        checkpoint: the opened files.
        contents: parameters and bytes.
        facts: the model's facts; None = qinfer cannot run it.
        refusal: why it cannot.
        tokenizer: facts about the tokenizer, or an `error`.
    """

    checkpoint: Checkpoint
    contents: Description
    facts: ModelConfig | None
    refusal: str | None
    tokenizer: dict[str, Any]


@click.command(short_help="Tell what a checkpoint is.")
@click.argument("model", metavar="MODEL")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of tables.")
@click.option("--allow-pickle", is_flag=True, help="Look into pytorch_model.bin (tensors only).")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def command(model: str, *, as_json: bool, allow_pickle: bool, revision: str | None) -> None:
    """Tell what MODEL (directory, hub id or .gguf file) is, without loading it.

    Architecture, parameters, types, quantization, size by part, recorded KV cache type,
    tokenizer and files.
    """
    path = resolve_model(model, revision=revision, gguf_weights="codes")
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    inspection = _inspect(checkpoint)
    if as_json:
        click.echo(json.dumps(_to_dict(inspection), indent=2))
    else:
        _render(inspection)


def _inspect(checkpoint: Checkpoint) -> Inspection:
    facts, refusal = None, None
    try:
        facts = ModelConfig.from_dict(checkpoint.config)
    except QinferError as error:
        refusal = str(error)
    return Inspection(checkpoint, describe(checkpoint), facts, refusal, _tokenizer(checkpoint.path))


def _tokenizer(path: Path) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(path)
    except QinferError as error:
        return {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "num_special_tokens": len(tokenizer.special_ids),
        "chat_template": tokenizer.has_chat_template,
    }


def _to_dict(inspection: Inspection) -> dict[str, Any]:
    """Return the documented JSON object."""
    checkpoint, contents = inspection.checkpoint, inspection.contents
    settings, facts = checkpoint.quantization, inspection.facts
    scheme = checkpoint.kv_scheme
    static = parse_kv_scheme(settings.raw) if settings else None
    return {
        "kind": "inspection",
        "format_version": FORMAT_VERSION,
        "path": str(checkpoint.path),
        "architecture": (checkpoint.config.get("architectures") or [None])[0],
        "model_type": checkpoint.config.get("model_type"),
        "supported": facts is not None,
        "refusal": inspection.refusal,
        "facts": _facts(facts) if facts else None,
        "parameters": contents.total.parameters,
        "bytes": contents.total.num_bytes,
        "bits_per_weight": round(contents.total.bits_per_weight, 3),
        "parts": {
            part.name: {
                "parameters": part.parameters,
                "bytes": part.num_bytes,
                "bits_per_weight": round(part.bits_per_weight, 3),
            }
            for part in contents.parts
        },
        "dtypes": contents.dtypes,
        "quantization": None
        if settings is None
        else {
            "method": settings.method,
            "format": settings.version,
            "modules": contents.schemes,
            "dense_linears": contents.dense_linears,
        },
        "kv_cache": None
        if scheme is None
        else {"dtype": scheme.dtype, "granularity": scheme.granularity},
        "kv_bytes_per_token": _kv_bytes(facts, scheme),
        "static_kv_scales": None if static is None else str(static),
        "tokenizer": inspection.tokenizer,
        "eos_token_ids": _eos_ids(checkpoint),
        "files": {path.name: path.stat().st_size for path in _files(checkpoint.path)},
    }


def _facts(facts: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_heads": facts.num_heads,
        "num_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position": facts.max_position,
        "tie_word_embeddings": facts.tie_word_embeddings,
        "dtype": facts.dtype,
        "experts": None if facts.moe is None else _experts(facts.moe),
    }


def _experts(moe: MoEConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "sparse_layers": sum(moe.sparse_layers),
    }


def _kv_bytes(facts: ModelConfig | None, scheme: KVScheme | None) -> int | None:
    """Return the cache's bytes per token in the recorded scheme, else in the model's type."""
    if facts is None:
        return None
    scheme = scheme or parse_kv_dtype(facts.dtype)
    layout = KVLayout(facts.num_layers, facts.num_kv_heads, facts.head_dim, scheme)
    return layout.bytes_per_token


def _eos_ids(checkpoint: Checkpoint) -> list[int]:
    value = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file())


def _render(inspection: Inspection) -> None:
    report = _to_dict(inspection)
    rows = [[name, value] for name, value in _summary(report).items()]
    console.show(console.table(report["path"], ["", ""], rows, left=2))
    contents = inspection.contents
    console.show_table(
        "size by part",
        ["part", "parameters", "MB", "bits per weight"],
        [_part_row(part) for part in (*contents.parts, contents.total)],
    )
    console.show_table(
        "files",
        ["file", "bytes"],
        [[name, f"{size:,}"] for name, size in report["files"].items()],
    )


def _summary(report: dict[str, Any]) -> dict[str, str]:
    """Return the lines of the first table: a label and a phrase each."""
    facts, tokenizer = report["facts"], report["tokenizer"]
    lines = {"architecture": f"{report['architecture']} ({report['model_type']})"}
    if facts:
        lines["shape"] = (
            f"{facts['num_layers']} layers, hidden {facts['hidden_size']}, {facts['num_heads']} "
            f"heads / {facts['num_kv_heads']} kv of {facts['head_dim']}, ffn "
            f"{facts['intermediate_size']}, vocabulary {facts['vocab_size']}, context "
            f"{facts['max_position']}"
        )
        if facts["experts"]:
            experts = facts["experts"]
            lines["experts"] = (
                f"{experts['num_experts']} of {experts['intermediate_size']} in "
                f"{experts['sparse_layers']} layers, {experts['num_experts_per_token']} per token"
            )
        lines["head"] = "tied to the embedding" if facts["tie_word_embeddings"] else "its own"
    else:
        lines["not runnable"] = report["refusal"]
    lines["parameters"] = f"{report['parameters']:,}"
    lines["weights"] = f"{console.megabytes(report['bytes'])}, " + ", ".join(
        f"{console.megabytes(size)} {dtype}" for dtype, size in report["dtypes"].items()
    )
    lines["quantization"] = _quantization(report["quantization"])
    lines["kv cache"] = _kv_cache(report)
    lines["tokenizer"] = _tokenizer_line(tokenizer)
    lines["end tokens"] = ", ".join(str(token) for token in report["eos_token_ids"]) or "none"
    return lines


def _quantization(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "none"
    modules = ", ".join(f"{count} x {scheme}" for scheme, count in settings["modules"].items())
    dense = settings["dense_linears"]
    return f"{settings['format']}: {modules}" + (f", {dense} unquantized" if dense else "")


def _kv_cache(report: dict[str, Any]) -> str:
    recorded = report["kv_cache"]
    kind = f"{recorded['dtype']} recorded" if recorded else "no type recorded"
    size = report["kv_bytes_per_token"]
    if report["static_kv_scales"]:
        kind += f" (scales for {report['static_kv_scales']}, for other engines)"
    return kind if size is None else f"{kind}, {size:,} bytes per token"


def _tokenizer_line(tokenizer: dict[str, Any]) -> str:
    if "error" in tokenizer:
        return str(tokenizer["error"])
    template = "with" if tokenizer["chat_template"] else "without"
    return (
        f"{tokenizer['vocab_size']} tokens, {tokenizer['num_special_tokens']} special, bos "
        f"{tokenizer['bos_token_id']}, eos {tokenizer['eos_token_id']}, {template} chat template"
    )


def _part_row(part: Part) -> list[str]:
    return [
        part.name,
        f"{part.parameters:,}",
        f"{part.num_bytes / 1e6:,.2f}",
        f"{part.bits_per_weight:.2f}",
    ]
