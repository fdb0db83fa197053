"""The examples run, and show what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_actor_and_a_critic_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXAMPLES / "actor_critic.py")
    monkeypatch.setattr("sys.argv", [script, "--iterations", "2", "--away", "nvme", "--folder", str(tmp_path)])
    runpy.run_path(script, run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("the critic learns, has") == 2
    assert "iteration 1: reward" in said
    totals = [line.split()[1] for line in said.splitlines() if line.startswith("total")]
    assert totals == ["nvme"] * 2, "after its turn the actor has nothing on the device"
    assert list(tmp_path.iterdir()) == []
