"""Instruction sets of the C++ library, one at a time."""

from collections.abc import Iterator

import pytest

from qinfer.kernels.cpu import native

ISAS = ("avx512", "avx2", "portable")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each instruction set that this machine has."""
    library = native.load()
    if library is None:
        pytest.skip("the C++ library was not built or is switched off")
    best = library.isa
    if not library.use_isa(request.param):
        pytest.skip(f"this machine or build has no {request.param}")
    assert library.isa == request.param
    yield request.param
    assert library.use_isa(best)


@pytest.fixture
def isas() -> Iterator[Iterator[str]]:
    """Give the instruction sets that this machine has; each is in use when it is given."""
    library = native.load()
    if library is None:
        pytest.skip("the C++ library was not built or is switched off")
    best = library.isa
    yield (name for name in ISAS if library.use_isa(name))
    assert library.use_isa(best)
