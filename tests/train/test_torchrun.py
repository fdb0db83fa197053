"""Ranks and hosts that are killed: torchrun starts the run again, to the same weights."""

from pathlib import Path

import pytest

from tests.train.launched import job, kill_host, kill_rank
from tests.train.runs import (
    COMMON,
    Outcome,
    assert_same_weights,
    checkpoints,
    metrics,
    run_ranks,
    saved,
    steps_of,
    written,
)
from tests.train.test_resume import run_on_rank

STEPS = 10


def losses(out: Path) -> dict[int, float]:
    """What is told of each step; of one that was made again, the last."""
    return {line["step"]: line["loss"] for line in metrics(out) if line["event"] == "step" and "loss" in line}


@pytest.fixture(scope="module")
def whole(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Outcome]:
    """The file of a run of two ranks, the folder of its files in swap, and that run, to which nothing happens."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "swap").mkdir()
    # 20 rows, which one rank and two share: else accelerate fills the last step of an epoch.
    rows = "".join((made / "texts" / f"{split}.jsonl").read_text() for split in ("train", "test"))
    (folder / "rows.jsonl").write_text(rows)
    files = {"model_name_or_path": str(made / "marked"), "dataset_name": str(folder / "rows.jsonl")}
    changes = {"max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    placement = {"optimizer": "nvme", "nvme_path": [str(folder / "swap")]}
    settings = COMMON | files | changes | saving
    (found, _) = run_ranks(run_on_rank, 2, settings, folder / "whole", placement)
    assert found.status == 0
    file = written({**settings, "penstock": placement}, folder, "run")
    return file, folder / "swap", Outcome(found.logs, saved(folder / "whole"), folder / "whole")


def test_a_rank_that_is_killed_is_started_again(whole: tuple[Path, Path, Outcome], tmp_path: Path) -> None:
    """Every step was made, and the weights are those of the run to which nothing happened, bit for bit."""
    file, swap, expected = whole
    out = tmp_path / "out"
    with job(["--config", str(file), "--out", str(out)], tmp_path) as running:
        running.start(2, "1", kill_rank)
        assert running.ended(0) == 0, running.said
        assert len(running.ranks) == 4, "two, and the two after them"
    found = losses(out)
    assert list(found) == list(range(1, STEPS + 1))
    assert list(found.values()) == [loss for loss, _, _ in steps_of(expected.logs)]
    assert_same_weights(saved(out), expected.weights, 0)
    assert list(swap.iterdir()) == [], "files of ranks that were killed are gone"
    assert checkpoints(out) == checkpoints(expected.out)


def test_a_host_that_is_gone_is_done_without(whole: tuple[Path, Path, Outcome], tmp_path: Path) -> None:
    """Steps have the same rows on what is left, so losses are the same but for the order of sums."""
    file, _, expected = whole
    out = tmp_path / "out"
    with job(["--config", str(file), "--out", str(out)], tmp_path) as running:
        running.start(1, "1:2")
        running.start(1, "1:2", kill_host)
        assert running.ended(0) == 0, running.said
        assert len(running.ranks) == 3, "two, and the one that is left"
    found = list(losses(out).values())
    assert found == pytest.approx([loss for loss, _, _ in steps_of(expected.logs)], rel=1e-3)
