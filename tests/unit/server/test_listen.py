"""Addresses, sockets and certificates, all checked before anything is loaded."""

import socket
import ssl

import pytest
from support.live import TLS_FILES

from qinfer.errors import ConfigError
from qinfer.server.listen import bind, bind_unix, is_local, tls_context, unlink_unix, url_of


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_loopback_is_told_from_the_open_world(host, local):
    with bind(host, 0) as sock:
        assert is_local(sock) is local
        assert url_of(sock).startswith(f"http://{host}:")
        assert url_of(sock, tls=True).startswith(f"https://{host}:")


def test_addresses_that_cannot_be_bound():
    with pytest.raises(ConfigError, match="cannot bind"):
        bind("192.0.2.1", 0)  # reserved for documentation, so no machine's own
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_a_unix_socket_is_for_its_user_alone_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "qinfer.sock"
    sock = bind_unix(path)
    assert is_local(sock)
    assert url_of(sock) == f"http+unix://{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    unlink_unix(sock, path)
    assert not path.exists()


def test_a_unix_socket_of_a_killed_server_is_replaced_and_a_living_one_is_not(tmp_path):
    path = tmp_path / "qinfer.sock"
    bind_unix(path).close()  # as after kill -9: the name is there, and nobody listens
    with bind_unix(path) as sock:
        sock.listen()
        with pytest.raises(ConfigError, match="another server answers"):
            bind_unix(path)
    other = tmp_path / "file"
    other.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        bind_unix(other)
    assert other.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot bind"):
        bind_unix(tmp_path / "no folder" / "qinfer.sock")


def test_certificates(tmp_path):
    certificate, key = TLS_FILES / "server.crt", TLS_FILES / "server.key"
    assert tls_context(certificate, key).minimum_version >= ssl.TLSVersion.TLSv1_2
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    tls_context(both, None)


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("server.crt", "none.key", "--ssl-keyfile .* is no file"),
        ("none.crt", "server.key", "--ssl-certfile .* is no file"),
        ("server.crt", "other.key", "belongs to another certificate"),
        ("server.crt", "encrypted.key", "is encrypted"),
        ("server.crt", None, "must hold a certificate and its key"),
        ("README.md", "server.key", "must hold a certificate and its key"),
    ],
)
def test_certificates_that_cannot_work_say_why(certificate, key, message):
    with pytest.raises(ConfigError, match=message):
        tls_context(TLS_FILES / certificate, None if key is None else TLS_FILES / key)
