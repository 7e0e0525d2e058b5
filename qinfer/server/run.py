"""Running the application under uvicorn: the socket, signals and an honest exit."""

import ipaddress
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from qinfer.errors import ConfigError, QinferError

KEEP_ALIVE_SECONDS = 75  # longer than the usual client pools keep idle connections


def is_loopback(sock: socket.socket) -> bool:
    """Tell whether only programs of this machine can reach a bound socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a taken port ends the start early.

    Args:
        host: address or name to bind.
        port: 0 = any free port.

    Raises:
        ConfigError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address at which a bound socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, sock: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT: stop accepting, finish what runs, return (S10).

    Args:
        app: the application.
        sock: from `bind`.
        on_ready: called when requests are answered.

    Raises:
        QinferError: it never got as far as answering.
    """
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_SECONDS
    )
    server = _Server(config, on_ready)
    server.run(sockets=[sock])
    if not server.started:
        raise QinferError("the server could not start; the log says why")


class _Server(uvicorn.Server):
    """A server whose exit is no failure, and that a second signal ends at once."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then tell."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Begin to stop at the first signal, give up waiting at the second.

        uvicorn's own method also notes the signal, to raise it again at the end; but a stop that
        was asked for and went well ends with status 0.
        """
        self.force_exit = self.should_exit
        self.should_exit = True
