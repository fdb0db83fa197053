"""`penstock train --dp-replicate 2` on four ranks trains as four ranks do that share one copy of the state."""

import json
from pathlib import Path

from tests.unit.cli.training.test_cp import RUN, assert_same, several_ranks, told


def test_copies_of_the_state_train_as_one_that_all_ranks_share(model_folder: Path, tmp_path: Path) -> None:
    """Two copies, each shared by two ranks, which share sequences or not; and a run of copies goes on with one."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "the quick brown fox"[: 3 + 5 * n % 17]}) + "\n" for n in range(80)))
    flat = ["train", "--model", str(model_folder), "--data", str(data), *RUN, "--global-batch", "8"]
    several_ranks(
        4,
        [*flat, "--out", "flat"],
        [*flat, "--dp-replicate", "2", "--out", "copies", "--save-every", "2"],
        [*flat, "--dp-replicate", "2", "--cp", "2", "--out", "shared"],
        [*flat, "--out", "went-on", "--resume", "copies/checkpoints/step-00000002"],
        folder=tmp_path,
    )
    wanted = told(tmp_path / "flat")
    assert len(wanted["step"]) == 4
    assert_same(wanted, told(tmp_path / "copies"), close=1e-6)
    assert_same(wanted, told(tmp_path / "shared"), close=1e-5)
    assert_same({"step": wanted["step"][2:]}, told(tmp_path / "went-on"), close=1e-6)
    held = {name: sum(told(tmp_path / name)["step"][0]["bytes_by_tier"].values()) for name in ("flat", "copies")}
    assert held["copies"] > 1.8 * held["flat"]  # a half of it, not a quarter
    counts = {told(tmp_path / name)["end"][0]["token_count"] for name in ("flat", "copies", "shared")}
    assert len(counts) == 1  # each token is seen once
