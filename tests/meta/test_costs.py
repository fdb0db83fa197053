"""What tests cost is reported, and fails nothing."""

from types import SimpleNamespace

import pytest

from tests.costs import Meter


def test_a_run_far_above_its_lines_passes() -> None:
    """`make test` failed with 13,342 passed and 0 failed: another machine was slower than the budgets' own."""
    meter = Meter(SimpleNamespace())  # type: ignore[arg-type]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    meter.costs["unit/test_small.py"] = 1e6
    meter.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.OK
