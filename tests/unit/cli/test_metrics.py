import dataclasses
import json
from pathlib import Path

import pytest

from penstock.cli.training import metrics as module
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.metrics import check_tensorboard, open_metrics
from penstock.cli.training.progress import Progress
from penstock.errors import ConfigError

PROGRESS = Progress(
    step=20,
    steps=600,
    loss=2.5,
    grad_norm=0.75,
    lr=1e-3,
    tokens_per_second=100.0,
    seconds=10.0,
    skipped_count=0,
    bytes_by_tier={"cpu": 8},
)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_events_are_lines_of_json_as_they_happen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of an earlier run\n")
    with open_metrics(TrainConfig(out=tmp_path), is_first_rank=True) as metrics:
        metrics.start(world_size=2)
        metrics.evaluation(0, 5.5, 0.25)
        metrics.step(PROGRESS)
        assert len(lines(tmp_path)) == 3
        metrics.end(loss_after=2.0)
    assert lines(tmp_path) == [
        {"event": "start", "world_size": 2},
        {"event": "eval", "step": 0, "loss": 5.5, "seconds": 0.25},
        {
            "event": "step",
            "step": 20,
            "loss": 2.5,
            "grad_norm": 0.75,
            "lr": 1e-3,
            "tokens_per_second": 100.0,
            "seconds": 10.0,
            "skipped_count": 0,
            "bytes_by_tier": {"cpu": 8},
        },
        {"event": "end", "loss_after": 2.0},
    ]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with open_metrics(TrainConfig(out=tmp_path), is_first_rank=True) as metrics:
        metrics.step(dataclasses.replace(PROGRESS, grad_norm=float("nan"), loss=float("inf")))
    (line,) = lines(tmp_path)
    assert line["grad_norm"] is None
    assert line["loss"] is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with open_metrics(TrainConfig(out=tmp_path, tensorboard=True), is_first_rank=False) as metrics:
        metrics.step(PROGRESS)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_metrics(TrainConfig(out=tmp_path, tensorboard=True), is_first_rank=True) as metrics:
        metrics.step(PROGRESS)
        metrics.evaluation(20, 5.5, 0.25)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {
        "train/loss": [(20, 2.5)],
        "train/grad_norm": [(20, 0.75)],
        "train/lr": [(20, pytest.approx(1e-3))],
        "train/tokens_per_second": [(20, 100.0)],
        "eval/loss": [(20, 5.5)],
    }


def test_tensorboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^--tensorboard needs TensorBoard. Install it with: pip install "):
        check_tensorboard()
