"""What tests cost is reported, and fails nothing."""

from types import SimpleNamespace

import pytest

from tests.costs import DEAREST, FILE_SECONDS, Meter, report


def test_the_dearest_files_and_those_above_their_line_are_named() -> None:
    cheap = {f"test_{number:02}.py": number / 10 for number in range(2 * DEAREST)}
    assert [line.split()[1] for line in report(cheap)[1:]] == [
        f"tests/test_{2 * DEAREST - n:02}.py" for n in range(1, 11)
    ]
    dear = {f"test_{number:02}.py": FILE_SECONDS + 1 for number in range(2 * DEAREST)}
    assert sum(", above " in line for line in report(dear)) == 2 * DEAREST


def test_a_run_far_above_its_lines_passes() -> None:
    """`make test` failed with 13,342 passed and 0 failed: another machine was slower than the budgets' own."""
    meter = Meter(SimpleNamespace())  # type: ignore[arg-type]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    meter.costs["unit/test_small.py"] = 1e6
    meter.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert session.exitstatus == pytest.ExitCode.OK
