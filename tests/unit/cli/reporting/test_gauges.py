"""What is read beside the loss, for the steps that are reported."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.reporting import gauges as module
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.spread import Spread
from penstock.cli.training.reporting.waits import Waits
from tests.unit.cli.reporting.test_reports import PROGRESS

ALONE = Ranks(0, 1, torch.device("cpu"))
WAITS = Waits(0.5, {"fetch": 0.5}, "NVMe reads")
SPREAD = Spread((1.0, 1.5))


class Noting:
    """A watch that notes what it is asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options = options
        self.candidates: list[int] = []
        self.ended = False

    def begin(self, step: int, *, is_candidate: bool) -> None:
        self.candidates += [step] * is_candidate

    def end(self, step: int) -> Waits | None:
        return WAITS if step == 20 else None

    def take_spread(self) -> Spread | None:
        return SPREAD

    def __exit__(self, *error: Any) -> None:
        self.ended = True


def gauges(folder: Path, ranks: Ranks = ALONE, **options: Any) -> Gauges:
    config = TrainConfig(**{"out": folder, "steps": 23, "log_every": 5, "precision": "fp32"} | options)
    course = recipe_for(config, positions=None, world_size=ranks.world_size).over(config, 100)
    unused: Any = None
    return Gauges(nn.Linear(10, 10, bias=False), unused, config, course, ranks, begin=3)


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Watch", Noting)


@pytest.mark.parametrize(
    ("options", "candidates"),
    [
        ({}, [4, 9, 14, 19, 22]),
        ({"log_every": 100}, [22]),
        ({"steps": 5, "warmup": 0.0, "log_every": 1}, [1, 2, 3, 4]),
    ],
)
def test_the_step_before_one_that_is_reported_may_be_traced(
    tmp_path: Path, options: dict[str, Any], candidates: list[int]
) -> None:
    with gauges(tmp_path, **options) as reader:
        watch: Any = reader._watch
        assert watch.options == {"begin": 3}
        for step in range(1, options.get("steps", 23) + 1):
            reader.begin(step)
        assert watch.candidates == candidates
    assert watch.ended


def test_a_report_is_completed(tmp_path: Path) -> None:
    read = gauges(tmp_path).read(PROGRESS)
    assert read.host_peak_bytes is not None
    assert read.host_peak_bytes > 10 << 20
    assert read == dataclasses.replace(PROGRESS, waits=WAITS, spread=SPREAD, host_peak_bytes=read.host_peak_bytes)
    assert gauges(tmp_path).read(dataclasses.replace(PROGRESS, step=21)).waits is None


def test_what_nobody_knows_of_a_device_is_not_made_up(tmp_path: Path) -> None:
    assert gauges(tmp_path).read(PROGRESS).mfu is None  # a cpu
    two = Ranks(0, 2, torch.device("cpu"))
    read = gauges(tmp_path, two, peak_flops=1e6).read(PROGRESS)
    assert read.mfu == pytest.approx(100.0 * 6 * 100 / (2 * 1e6))  # tokens a second, operations of a token


def test_a_device_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA H200")
    assert gauges(tmp_path).read(PROGRESS).mfu == pytest.approx(100.0 * 600 / 67e12)
    assert gauges(tmp_path, precision="bf16").read(PROGRESS).mfu == pytest.approx(100.0 * 600 / 989.5e12)
    assert gauges(tmp_path, peak_flops=6e4).read(PROGRESS).mfu == pytest.approx(1.0)
