"""`qinfer serve`: a model behind an OpenAI-compatible API, or what it would be with --dry-run."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from qinfer.cli import console
from qinfer.cli.loading import load_llm
from qinfer.cli.options import EngineOptions, chat_template_option, engine_options, model_argument
from qinfer.engine.aio import AsyncEngine
from qinfer.engine.llm import LLM
from qinfer.engine.params import SamplingDefaults
from qinfer.report.jsonio import dump_json
from qinfer.server.app import create_app
from qinfer.server.run import bind, is_loopback, serve, url_of
from qinfer.server.service import ServerSettings

PLAN_VERSION = 1


@click.command(short_help="Serve a model through an OpenAI-compatible API.")
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to bind; 0 = any free one.",
)
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name that requests use; MODEL as written if not given. Repeatable: the first is shown.",
)
@chat_template_option
@click.option("--dry-run", is_flag=True, help="Load, show kernels, memory and limits, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print what --dry-run shows as JSON.")
@engine_options()
def command(
    model: str,
    *,
    names: tuple[str, ...],
    chat_template: str | None,
    dry_run: bool,
    as_json: bool,
    engine: EngineOptions,
    **address: Any,
) -> None:
    """Serve MODEL (directory, hub id or .gguf file) at /v1/chat/completions and its relatives.

    SIGTERM or Ctrl-C stops accepting and finishes what runs; a second one ends at once.

    \b
    Examples:
      qinfer serve MODEL
      qinfer serve MODEL --kv-cache-dtype int8 --max-model-len 4096 --port 9000
      qinfer serve MODEL --dry-run
    """
    if as_json and not dry_run:
        raise click.UsageError("--json belongs to --dry-run.")
    if dry_run:
        with load_llm(model, engine, chat_template=chat_template) as llm:
            _show_plan(model, llm, as_json=as_json)
        return
    sock = bind(**address)
    with sock, load_llm(model, engine, chat_template=chat_template) as llm:
        limits = llm.core.limits
        settings = ServerSettings(
            served_model_names=names or (model,), max_model_len=limits.max_model_len
        )
        app = create_app(AsyncEngine(llm.core), llm.tokenizer, settings)
        url = url_of(sock)
        if not is_loopback(sock):
            console.warn(
                f"{url} can be reached from other machines, and there is no authentication; "
                "put a proxy in front, or bind 127.0.0.1"
            )
        serve(app, sock, on_ready=lambda: console.remark(_ready_line(url, settings, llm)))


def _ready_line(url: str, settings: ServerSettings, llm: LLM) -> str:
    memory, defaults = llm.memory(), llm.core.limits.defaults
    sampling = "" if defaults == SamplingDefaults() else f"; sampling {_defaults(defaults)}"
    return (
        f"serving {', '.join(settings.served_model_names)} at {url}: "
        f"weights {_megabytes(memory.weights_bytes)}, "
        f"{llm.config.kv_cache_dtype} KV for {memory.kv_capacity_tokens:,} tokens, "
        f"largest context {settings.max_model_len:,}{sampling}"
    )


def _defaults(defaults: SamplingDefaults) -> str:
    """Return what an unset sampling field of a request means (E06)."""
    return ", ".join(f"{name} {value:g}" for name, value in asdict(defaults).items())


def serve_plan(model: str, llm: LLM) -> dict[str, Any]:
    """Return what --dry-run shows, as JSON data: kernels, memory in bytes, limits."""
    memory, config = llm.memory(), llm.config
    context = llm.core.limits.max_model_len
    return {
        "kind": "serve_plan",
        "format_version": PLAN_VERSION,
        "model": model,
        "config": asdict(config),
        "kernels": [
            asdict(row) | {"refusals": [list(pair) for pair in row.refusals]}
            for row in llm.kernels()
        ],
        "memory": asdict(memory),
        "sampling_defaults": asdict(llm.core.limits.defaults),
        "limits": {
            "max_model_len": context,
            "kv_capacity_tokens": memory.kv_capacity_tokens,
            "full_length_sequences": memory.kv_capacity_tokens // context,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        },
    }


def _show_plan(model: str, llm: LLM, *, as_json: bool) -> None:
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
    sizes = [
        ("weights, resident", _megabytes(memory["weights_bytes"])),
        ("weights, on disk", _megabytes(memory["checkpoint_bytes"])),
        ("KV cache", _megabytes(memory["kv_allocated_bytes"])),
        (f"KV per token ({config.kv_cache_dtype})", f"{memory['kv_bytes_per_token']:,} B"),
        ("activations of a full step, predicted", _megabytes(memory["activation_bytes"])),
        ("peak of this process so far", _megabytes(memory["peak_rss_bytes"])),
    ]
    console.show(console.table("Memory", ["what", "size"], [list(row) for row in sizes]))
    bounds = [
        ("largest context, prompt and answer", f"{limits['max_model_len']:,} tokens"),
        ("KV cache holds", f"{limits['kv_capacity_tokens']:,} tokens"),
        ("sequences of full length at once", f"{limits['full_length_sequences']:,}"),
        ("requests that run at once", f"{limits['max_num_seqs']:,}"),
        ("tokens per step", f"{limits['max_num_batched_tokens']:,}"),
        ("sampling, where a request says nothing", _defaults(llm.core.limits.defaults)),
    ]
    console.show(console.table("Limits", ["what", "value"], [list(row) for row in bounds]))


def _kind(layer: str) -> str:
    """Return a layer's name without its number: `model.layers.*.self_attn.q_proj`."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _reasons(refusals: list[list[str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refusals) or "none"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
