"""What `qinfer serve --dry-run` shows: kernels, memory and limits, as tables or as JSON."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from qinfer.cli import console
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingDefaults
from qinfer.report.jsonio import dump_json

PLAN_VERSION = 1


def serve_plan(model: str, llm: LLM) -> dict[str, Any]:
    """Return what --dry-run shows, as JSON data: kernels, memory in bytes, limits."""
    memory = llm.memory()
    context = llm.core.limits.max_model_len
    return {
        "kind": "serve_plan",
        "format_version": PLAN_VERSION,
        "model": model,
        "config": asdict(llm.config),
        "kernels": [
            asdict(row) | {"refusals": [list(pair) for pair in row.refusals]}
            for row in llm.kernels()
        ],
        "memory": asdict(memory) | {"weights": asdict(llm.weight_bytes())},
        "sampling_defaults": asdict(llm.core.limits.defaults),
        "limits": {
            "max_model_len": context,
            "full_length_sequences": memory.kv_capacity_tokens // context,
            **engine_limits(llm),
        },
    }


def engine_limits(llm: LLM) -> dict[str, int]:
    """Return what the engine takes on at most, by name."""
    config = llm.config
    return {
        "kv_capacity_tokens": llm.memory().kv_capacity_tokens,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_mixed_tokens": config.max_num_mixed_tokens,
    }


def show_plan(model: str, llm: LLM, *, as_json: bool) -> None:
    """Print what serving MODEL would be."""
    plan = serve_plan(model, llm)
    if as_json:
        click.echo(dump_json(plan), nl=False)
        return
    # Layers that differ only in their number got the same kernel for the same reasons.
    kinds = Counter(
        (_kind(row["layer"]), row["description"], row["kernel"], _reasons(row["refusals"]))
        for row in plan["kernels"]
    )
    console.show(
        console.table(
            "Kernels",
            ["layer", "form", "kernel", "refused before it", "layers"],
            [[*kind, str(count)] for kind, count in kinds.items()],
            left=4,
        )
    )
    memory, limits, config = plan["memory"], plan["limits"], llm.config
    draft = memory["draft_bytes"]
    sizes = [
        ("weights, resident", console.megabytes(memory["weights_bytes"])),
        *_weights(memory["weights"]),
        ("weights, on disk", console.megabytes(memory["checkpoint_bytes"])),
        ("KV cache", console.megabytes(memory["kv_allocated_bytes"])),
        (f"KV per token ({config.kv_cache_dtype})", f"{memory['kv_bytes_per_token']:,} B"),
        *([("draft model and its cache", console.megabytes(draft))] if draft else []),
        ("activations of a full step, predicted", console.megabytes(memory["activation_bytes"])),
        ("peak of this process so far", console.megabytes(memory["peak_rss_bytes"])),
    ]
    console.show(console.table("Memory", ["what", "size"], [list(row) for row in sizes]))
    bounds = [
        ("largest context, prompt and answer", f"{limits['max_model_len']:,} tokens"),
        ("KV cache holds", f"{limits['kv_capacity_tokens']:,} tokens"),
        ("sequences of full length at once", f"{limits['full_length_sequences']:,}"),
        ("requests that run at once", f"{limits['max_num_seqs']:,}"),
        ("tokens per step", f"{limits['max_num_batched_tokens']:,}"),
        ("sampling, where a request says nothing", describe_defaults(llm.core.limits.defaults)),
    ]
    console.show(console.table("Limits", ["what", "value"], [list(row) for row in bounds]))


def _weights(weights: dict[str, int | None]) -> list[tuple[str, str]]:
    """Return one row per part of the weights; a tied part shares another's memory and has none."""
    parts = [(name, weights[name]) for name in ("layers", "embedding", "head")]
    parts.append(("of all, in huge pages", weights["huge_pages"]))
    return [(f"  {name}", console.megabytes(size)) for name, size in parts if size]


def _kind(layer: str) -> str:
    """Return a layer's name without its number: `model.layers.*.self_attn.q_proj`."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _reasons(refusals: list[list[str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals) or "none"


def describe_defaults(defaults: SamplingDefaults) -> str:
    """Return what an unset sampling field of a request means (E06)."""
    return ", ".join(f"{name} {value:g}" for name, value in asdict(defaults).items())
