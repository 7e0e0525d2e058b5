"""The socket that is bound before anything is loaded."""

import pytest

from qinfer.errors import ConfigError
from qinfer.server.run import bind, is_loopback, url_of


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_loopback_is_told_from_the_open_world(host, loopback):
    with bind(host, 0) as sock:
        assert is_loopback(sock) is loopback
        assert url_of(sock).startswith(f"http://{host}:")


def test_addresses_that_cannot_be_bound():
    with pytest.raises(ConfigError, match="cannot bind"):
        bind("192.0.2.1", 0)  # reserved for documentation, so no machine's own
