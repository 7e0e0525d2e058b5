"""Where the server listens: a TCP address or a Unix socket, plain or with TLS.

Everything that can be wrong is found here, before a model is loaded.
"""

import ipaddress
import socket
import ssl
import stat
from pathlib import Path

from qinfer.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a taken port ends the start early.

    A port that a killed server left behind can be bound at once (SO_REUSEADDR).

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
        raise ConfigError(
            f"cannot bind {host}:{port}: {error.strerror}; choose another --port, or 0 for any "
            "free one"
        ) from error
    return sock


def bind_unix(path: Path) -> socket.socket:
    """Return a socket bound to a path, which only the user may connect to.

    A socket that a killed server left behind is replaced; one that somebody answers at is not.

    Raises:
        ConfigError: the path is taken or cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot bind --uds {path}: {error.strerror or error}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def unlink_unix(sock: socket.socket, path: Path | None) -> None:
    """Close a socket, and remove its path if it is a Unix socket."""
    sock.close()
    if path is not None:
        path.unlink(missing_ok=True)


def is_local(sock: socket.socket) -> bool:
    """Tell whether only programs of this machine can reach a bound socket."""
    if sock.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the address at which a bound socket is reached."""
    scheme = "https" if tls else "http"
    if sock.family == socket.AF_UNIX:
        return f"{scheme}+unix://{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(certfile: Path, keyfile: Path | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer.

    Args:
        certfile: PEM, the server's certificate first, then those that lead to its authority.
        keyfile: PEM; None = the key is in `certfile`.

    Raises:
        ConfigError: a file is missing or is no PEM, the key is encrypted or another's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option} {path} is no file")
    encrypted = False

    def password() -> str:  # asked for encrypted keys only; the default would ask the terminal
        nonlocal encrypted
        encrypted = True
        return ""

    place = certfile if keyfile is None else keyfile
    try:
        context.load_cert_chain(certfile, keyfile, password)
    except (ssl.SSLError, OSError) as error:
        if encrypted:
            reason = f"the key in {place} is encrypted; store it decrypted, readable by you alone"
        elif isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            reason = f"the key in {place} belongs to another certificate than {certfile}"
        else:
            reason = f"{certfile} and {place} must hold a certificate and its key as PEM: {error}"
        raise ConfigError(f"TLS cannot be set up: {reason}") from error
    return context


def _remove_stale(path: Path) -> None:
    """Remove a socket at which nobody answers.

    Raises:
        ConfigError: the path is something else, or somebody does.
        OSError: it cannot be looked at or removed.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"--uds {path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"--uds {path}: another server answers there")
