"""`penstock import-deepspeed`: what comes out is a checkpoint like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
from tests.deepspeed_checks import prepared

DATA = Path(__file__).parents[2] / "data" / "deepspeed"


def test_a_checkpoint_like_any_other(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    outcome = penstock_command("import-deepspeed", str(DATA / "z1-fp32-w2"), "out")
    assert (outcome.exit_code, outcome.out) == (0, "out\n")
    assert penstock_command("inspect", "out", "--verify").exit_code == 0
    penstock.export(tmp_path / "out", tmp_path / "weights", dtype="fp32")
    assert (tmp_path / "weights" / "model.safetensors").exists()
    _, optimizer = prepared()
    assert optimizer.load(tmp_path / "out")["global_steps"] == 3
