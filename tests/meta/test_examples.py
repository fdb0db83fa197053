"""The examples run, and show what they say."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_actor_and_a_critic_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "actor_critic.py"), "--iterations", "2", "--away", "nvme"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the critic learns, has") == 2
    assert "iteration 1: reward" in done.stdout
    totals = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("total")]
    assert totals == ["nvme"] * 2, "after its turn the actor has nothing on the device"
    assert list(tmp_path.iterdir()) == []
