"""The instruction sets of this machine, for tests of the rules."""

from collections.abc import Iterator

import pytest

from penstock import _native


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    """The best instruction set is in use after each test."""
    yield
    _native.set_isa(_native.isas()[0])


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Run the test once per instruction set of this machine."""
    _native.set_isa(request.param)
    return str(request.param)
