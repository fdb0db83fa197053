"""What does not fit, or cannot be, is refused before data is read; a dry run tells what a run takes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import MemoryBudgetError
from penstock.train import fit


def test_a_disk_that_is_too_small_for_checkpoints_is_refused(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_space", lambda folder: (folder, 1 << 20))
    with pytest.raises(MemoryBudgetError, match=r"1,048,576 bytes free, and 4 checkpoints with the model need 1,\d+,"):
        train("--save_total_limit", 3)


@pytest.mark.parametrize("placement", [["--placement", "auto"], ["--use_peft", "--base", "int8"]])
def test_a_dry_run_tells_what_a_run_takes_and_makes_nothing(
    placement: list[str], train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry_run", *placement) == 0
    told = capsys.readouterr()
    assert "⟦" in told.out, "rows, and what is learned of them"
    assert "exp_avg" in told.out
    assert "a checkpoint" in told.out
    assert "checkpoints and model" in told.out
    assert ("bound by" in told.out) is ("auto" in placement)
    assert "nothing is wrong with this run" in told.err
    assert {path.name for path in (tmp_path / "out").glob("*")} <= {"cache"}


def test_a_dry_run_of_what_does_not_fit_tells_both(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MemoryBudgetError):
        train("--dry_run", "--max_host_bytes", "10kB")
    assert "exp_avg" in capsys.readouterr().out
