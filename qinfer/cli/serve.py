"""`qinfer serve`: a model behind an OpenAI-compatible API, or what it would be with --dry-run."""

import os
import socket
import ssl
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from qinfer import __version__
from qinfer.cli import console
from qinfer.cli.loading import load_llm
from qinfer.cli.options import EngineOptions, chat_template_option, engine_options, model_argument
from qinfer.cli.serve_plan import describe_defaults, engine_limits, show_plan
from qinfer.cli.server_options import ServerOptions, server_options
from qinfer.engine.aio import AsyncEngine
from qinfer.engine.llm import LLM
from qinfer.engine.memory import capacity_line
from qinfer.errors import ConfigError
from qinfer.server.app import create_app
from qinfer.server.jsonlog import JsonLog
from qinfer.server.listen import bind, bind_unix, is_local, tls_context, unlink_unix, url_of
from qinfer.server.run import RunSettings, serve
from qinfer.server.service import ServerSettings
from qinfer.server.settings import OperationSettings


@click.command(short_help="Serve a model through an OpenAI-compatible API.")
@model_argument
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name that requests use; MODEL as written if not given. Repeatable: the first is shown.",
)
@chat_template_option
@click.option("--dry-run", is_flag=True, help="Load, show kernels, memory and limits, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print what --dry-run shows as JSON.")
@server_options
@engine_options()
def command(
    model: str,
    *,
    names: tuple[str, ...],
    chat_template: str | None,
    dry_run: bool,
    as_json: bool,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve MODEL (directory, hub id or .gguf file) at /v1/chat/completions and its relatives.

    SIGTERM or Ctrl-C refuses new work and finishes what runs; a second one ends at once. Status:
    0 stopped as asked, 1 the engine failed, 2 bad options, 128 + N ended by a second signal N.

    \b
    Examples:
      qinfer serve MODEL
      qinfer serve MODEL --kv-cache-dtype int8 --max-model-len 4096 --port 9000
      qinfer serve MODEL --host 0.0.0.0 --api-key-file keys.txt \\
          --ssl-certfile cert.pem --ssl-keyfile key.pem --request-log requests.jsonl
      qinfer serve MODEL --max-queue 64 --drain-timeout 120 --exit-on-failure
      qinfer serve MODEL --dry-run
    """
    if as_json and not dry_run:
        raise click.UsageError("--json belongs to --dry-run.")
    if dry_run:
        with load_llm(model, engine, chat_template=chat_template) as llm:
            show_plan(model, llm, as_json=as_json)
        return
    with ExitStack() as stack:
        door = _open_door(server, stack)
        llm = stack.enter_context(load_llm(model, engine, chat_template=chat_template))
        _serve(llm, names or (model,), server, door)


@dataclass(frozen=True, slots=True)
class _Door:
    """What was opened before the model was loaded, so that mistakes show at once."""

    sock: socket.socket
    tls: ssl.SSLContext | None
    url: str
    operations: OperationSettings

    @property
    def num_keys(self) -> int:
        return 0 if self.operations.keys is None else len(self.operations.keys.keys)

    @property
    def security(self) -> str:
        """Who may call, and whether others can listen in; for the line at the start."""
        keys = f"{self.num_keys} API keys" if self.num_keys else "no API keys"
        return f"{keys}, {'TLS' if self.tls is not None else 'no TLS'}"


def _open_door(server: ServerOptions, stack: ExitStack) -> _Door:
    """Take the address, read keys and certificates, open the logs; closed with `stack`."""
    if server.ssl_keyfile is not None and server.ssl_certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate that it belongs to")
    keys = server.keys()
    tls = None
    if server.ssl_certfile is not None:
        tls = tls_context(server.ssl_certfile, server.ssl_keyfile)
    sock = bind(server.host, server.port) if server.uds is None else bind_unix(server.uds)
    stack.callback(unlink_unix, sock, server.uds)
    request_log, audit_log = server.open_logs()
    for log in (request_log, audit_log):
        if log is not None:
            stack.callback(log.close)
    operations = OperationSettings(
        keys=keys,
        cors_origins=server.cors_origin,
        request_log=request_log,
        audit_log=audit_log,
        log_prompts=server.log_prompts,
        max_concurrent_requests=server.max_concurrent_requests,
    )
    door = _Door(sock, tls, url_of(sock, tls=tls is not None), operations)
    _warn_if_open(door)
    return door


def _warn_if_open(door: _Door) -> None:
    """Warn about an address that other machines reach without what protects it."""
    if is_local(door.sock):
        return
    missing = []
    if door.operations.keys is None:
        missing.append("no authentication (--api-key-file)")
    if door.tls is None:
        missing.append("no encryption (--ssl-certfile)")
    if missing:
        console.warn(
            f"{door.url} can be reached from other machines, and there is "
            f"{' and '.join(missing)}; set them up, put a proxy in front, or bind 127.0.0.1"
        )


def _serve(llm: LLM, names: tuple[str, ...], server: ServerOptions, door: _Door) -> None:
    settings = ServerSettings(
        served_model_names=names,
        max_model_len=llm.core.limits.max_model_len,
        max_body_bytes=server.max_body_bytes,
        tool_call_parser=server.tool_call_parser,
        operations=door.operations.with_engine(memory=_memory(llm), limits=engine_limits(llm)),
    )
    engine = AsyncEngine(llm.core, max_requests=server.max_concurrent_requests)
    app = create_app(engine, llm.tokenizer, settings)
    audit = _Audit(door.operations.audit_log)
    run = RunSettings(
        drain_seconds=server.drain_timeout,
        exit_on_failure=server.exit_on_failure,
        tls=door.tls,
        on_failure=lambda reason: audit.note("failure", reason=reason),
        on_forced=lambda: unlink_unix(door.sock, server.uds),
    )

    def ready() -> None:
        audit.note("start", url=door.url, models=names, keys=_key_names(door), pid=os.getpid())
        console.remark(_ready_line(door, settings, llm))

    try:
        serve(app, door.sock, run, on_ready=ready)
    finally:
        audit.note("stop", url=door.url)


@dataclass(frozen=True, slots=True)
class _Audit:
    """The server's own lines of the audit log, if there is one."""

    log: JsonLog | None

    def note(self, event: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.write({"event": event, "version": __version__} | fields)


def _key_names(door: _Door) -> list[str]:
    keys = door.operations.keys
    return [] if keys is None else [key.name for key in keys.keys]


def _memory(llm: LLM) -> dict[str, int]:
    memory = llm.memory()
    return {
        "weights_bytes": memory.weights_bytes,
        "kv_cache_bytes": memory.kv_allocated_bytes,
        "draft_bytes": memory.draft_bytes,
        "activation_bytes": memory.activation_bytes,
    }


def _ready_line(door: _Door, settings: ServerSettings, llm: LLM) -> str:
    return (
        f"serving {', '.join(settings.served_model_names)} at {door.url}: "
        f"{capacity_line(llm.memory(), llm.config)}; "
        f"sampling {describe_defaults(llm.core.limits.defaults)}; {door.security}"
    )
