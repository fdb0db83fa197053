"""Engines that a test leaves open are closed after it: an error of that is the test's."""

from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest

import penstock
from tests.lib import engines


@pytest.fixture(autouse=True)
def engines_are_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `tests.lib.engines` prepares is kept until it is closed, but where tests are of engines that are dropped."""
    if getattr(request.module, "DROPS_ENGINES", False):
        yield
        return
    left: dict[int, penstock.Optimizer] = {}
    build, close = engines.build, penstock.Optimizer.close

    @wraps(build)
    def built(*given: Any) -> penstock.Optimizer:
        made = build(*given)
        left[id(made)] = made
        return made

    @wraps(close)
    def closed(optimizer: penstock.Optimizer, *given: Any, **named: Any) -> None:
        left.pop(id(optimizer), None)
        close(optimizer, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "build", built)
        patch.setattr(penstock.Optimizer, "close", closed)
        yield
        for optimizer in list(left.values()):
            optimizer.close()
