"""Options of `qinfer serve` about the server, apart from the model: address, keys, TLS, logs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from qinfer import env
from qinfer.cli import console
from qinfer.cli.options import Verb, check_folder, parse_size_option
from qinfer.engine.aio import DEFAULT_MAX_REQUESTS
from qinfer.engine.config import parse_size
from qinfer.errors import ConfigError
from qinfer.server.auth import KeyRing, parse_keys, read_keys, readable_by_others
from qinfer.server.jsonlog import STDOUT, JsonLog
from qinfer.server.run import DEFAULT_DRAIN_SECONDS
from qinfer.server.service import AUTO_PARSER
from qinfer.server.tool_calls import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the options said; checked alone, not yet together."""

    host: str
    port: int
    uds: Path | None
    api_key_file: Path | None
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    cors_origin: tuple[str, ...]
    request_log: str | None
    audit_log: str | None
    log_prompts: bool
    max_concurrent_requests: int
    max_body_size: str
    drain_timeout: float
    exit_on_failure: bool
    tool_call_parser: str

    @property
    def max_body_bytes(self) -> int:
        """Bytes that a request body may have."""
        return parse_size(self.max_body_size)

    def keys(self) -> KeyRing | None:
        """Return the API keys of the file and of the environment; None if there are none.

        Raises:
            ConfigError: they cannot be read.
        """
        found = []
        if self.api_key_file is not None:
            found.append(read_keys(self.api_key_file))
            if readable_by_others(self.api_key_file):
                console.warn(f"{self.api_key_file} can be read by other users; chmod 600 helps")
        in_environment = env.api_keys()
        if in_environment is not None:
            found.append(parse_keys(in_environment.split(","), "QINFER_API_KEYS"))
        keys = tuple(key for ring in found for key in ring.keys)
        short = [key.name for key in keys if key.short]
        if short:
            console.warn(f"API keys that are short enough to be guessed: {', '.join(short)}")
        return KeyRing(keys) if keys else None

    def open_logs(self) -> tuple[JsonLog | None, JsonLog | None]:
        """Return the request log and the audit log, opened.

        Raises:
            ConfigError: a file cannot be written, or prompts are to be logged nowhere.
        """
        if self.log_prompts and self.request_log is None:
            raise ConfigError("--log-prompts needs --request-log, which says where they go")
        if self.request_log is not None and self.request_log == self.audit_log:
            log = _open_log("--request-log", self.request_log)
            return log, log
        return _open_log("--request-log", self.request_log), _open_log(
            "--audit-log", self.audit_log
        )


def server_options(verb: Verb) -> Verb:
    """Add the options of a server to a verb, which receives them as `server: ServerOptions`."""
    names = [entry.name for entry in fields(ServerOptions)]

    @functools.wraps(verb)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        verb(*args, server=ServerOptions(**{name: kwargs.pop(name) for name in names}), **kwargs)

    decorated: Verb = wrapper
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def _open_log(option: str, target: str | None) -> JsonLog | None:
    if target is None:
        return None
    try:
        return JsonLog(target)
    except OSError as error:
        raise ConfigError(f"{option} {target} cannot be written: {error.strerror}") from error


def _check_origins(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    for origin in value:
        scheme, _, rest = origin.partition("://")
        if origin != "*" and (scheme not in {"http", "https"} or not rest or "/" in rest):
            raise click.BadParameter(
                f"{origin!r} is no origin such as https://example.org", context, parameter
            )
    return value


def _check_log(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != STDOUT:
        check_folder(context, parameter, Path(value))
    return value


_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS: list[Callable[[Verb], Verb]] = [
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port to bind; 0 = any free one.",
    ),
    click.option(
        "--uds", type=_FILE, help="Unix socket to listen at instead of --host and --port."
    ),
    click.option(
        "--api-key-file",
        type=_FILE,
        help="Keys, one a line as KEY or NAME KEY, of which every request must bring one as "
        "`Authorization: Bearer KEY`. Those in QINFER_API_KEYS count too.",
    ),
    click.option("--ssl-certfile", type=_FILE, help="Certificate chain (PEM): serve over TLS."),
    click.option(
        "--ssl-keyfile", type=_FILE, help="Its key (PEM), unless it is in --ssl-certfile."
    ),
    click.option(
        "--cors-origin",
        multiple=True,
        callback=_check_origins,
        metavar="ORIGIN",
        help="Let pages of this origin call from a browser, such as https://example.org, or * "
        "for all. Repeatable; none if not given.",
    ),
    click.option(
        "--request-log",
        metavar="FILE",
        callback=_check_log,
        help="Write a JSON line for every request, without its text; - = stdout.",
    ),
    click.option(
        "--audit-log",
        metavar="FILE",
        callback=_check_log,
        help="Write a JSON line for every start, stop, failure and refused key; - = stdout.",
    ),
    click.option(
        "--log-prompts", is_flag=True, help="Write what clients send into --request-log, too."
    ),
    click.option(
        "--max-concurrent-requests",
        type=click.IntRange(min=1),
        default=DEFAULT_MAX_REQUESTS,
        show_default=True,
        help="Requests that are answered at once; more are told to come back later.",
    ),
    click.option(
        "--max-body-size",
        default="4MiB",
        show_default=True,
        callback=parse_size_option,
        metavar="SIZE",
        help="Largest body of a request.",
    ),
    click.option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=DEFAULT_DRAIN_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="What runs may take so long after SIGTERM; then it is ended with an error.",
    ),
    click.option(
        "--exit-on-failure/--stay-on-failure",
        default=False,
        show_default=True,
        help="End with status 1 when the engine fails, for a supervisor to start it again.",
    ),
    click.option(
        "--tool-call-parser",
        type=click.Choice([AUTO_PARSER, *FAMILIES]),
        default=AUTO_PARSER,
        show_default=True,
        help="How the model spells calls of tools; auto = as its chat template shows.",
    ),
]
