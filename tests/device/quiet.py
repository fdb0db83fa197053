"""What every test on the strict device starts and ends with."""

import gc
import sys
from typing import Any

import pytest
import torch

MOST_LATE = 0.005  # seconds


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest):
    """A device that counts from zero; at the end of the test nothing may be left that is wrong on it."""
    native: Any = sys.modules["tests.device.backend"].native
    _settle(native)
    native.configure(sum(request.node.nodeid.encode()), MOST_LATE, True)
    torch.strict.set_device(0)
    yield
    races, error = _settle(native)
    assert races == [], "\n".join(races)
    if error is not None:
        raise error


def _settle(native: Any) -> tuple[list[str], Exception | None]:
    gc.collect()
    native.configure(0, 0.0, True)
    error = None
    for index in range(native.DEVICES):
        try:
            torch.accelerator.synchronize(index)
        except Exception as failed:
            error = failed
    races = native.take_races()
    for taken in (native.take_waits, native.take_launches, native.take_copied, native.take_spans):
        taken()
    return races, error
