"""What the tests of the rules share: hard values, guarded memory, comparison of bits, and the instruction sets."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from penstock import _native
from tests.unit.rules.segments import hard_values, same_bits


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once per instruction set of this machine, and leave the best one in use."""
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(_native.isas()[0])


@pytest.fixture(scope="session")  # of no state: tests of hypothesis may use it too
def assert_same_bits() -> Callable[[Tensor, Tensor], None]:
    """Equal bit by bit, signs of zeros included; a NaN is a NaN, whatever its payload."""

    def check(actual: Tensor, expected: Tensor) -> None:
        wrong = (~same_bits(actual, expected)).nonzero().flatten()
        first = wrong[:5]
        assert wrong.numel() == 0, (
            f"{wrong.numel()} of {actual.numel()} differ, at {first.tolist()}: "
            f"{actual[first].tolist()} instead of {expected[first].tolist()}"
        )

    return check


@pytest.fixture
def hard_fp32() -> Tensor:
    """Every sign and exponent with mantissas at the borders of both halves: ties, denormals, infinities and NaNs."""
    return hard_values()


class Guarded:
    """A flat tensor inside a larger one, at any offset; `check` finds writes outside of it."""

    def __init__(self, values: Tensor, offset: int) -> None:
        margin = 64
        self._base = torch.full((offset + values.numel() + margin,), 77, dtype=values.dtype)
        self.tensor = self._base[offset : offset + values.numel()]
        self.tensor.copy_(values)
        self._offset = offset

    def check(self) -> None:
        assert (self._base[: self._offset] == 77).all()
        assert (self._base[self._offset + self.tensor.numel() :] == 77).all()


@pytest.fixture
def guarded() -> Callable[[Tensor, int], Guarded]:
    return Guarded
