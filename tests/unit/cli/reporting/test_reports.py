"""What a run tells: people on a terminal and elsewhere, programs in files."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.training import reports as module
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.reports import (
    Panel,
    Progress,
    Reports,
    bytes_by_tier,
    check_tensorboard,
    format_bytes,
    format_seconds,
)
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
SHOWN = dataclasses.replace(PROGRESS, tokens_per_second=12345.6, bytes_by_tier={"device": 5 << 20, "cpu": 13 << 20})
LINE = "loss 2.5000  grad norm 0.750  lr 1.00e-03  tokens/s 12,346  state device 5.0 MiB cpu 13.0 MiB  left 4:50"


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_events_are_lines_of_json_as_they_happen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of an earlier run\n")
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start(world_size=2)
        reports.evaluation(0, 5.5, 0.25, token_name="byte")
        reports.step(PROGRESS)
        assert len(lines(tmp_path)) == 3
        reports.end(loss_after=2.0)
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
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start()
        reports.step(dataclasses.replace(PROGRESS, grad_norm=float("nan"), loss=float("inf")))
    _, line = lines(tmp_path)
    assert line["grad_norm"] is None
    assert line["loss"] is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Reports(TrainConfig(out=tmp_path, tensorboard=True), is_first_rank=False) as reports:
        reports.start()
        reports.step(PROGRESS)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Reports(TrainConfig(out=tmp_path, tensorboard=True), is_first_rank=True) as reports:
        reports.start()
        reports.step(PROGRESS)
        reports.evaluation(20, 5.5, 0.25, token_name="byte")
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.note("held-out [loss] 5.5")
        reports.step(SHOWN)
    assert capsys.readouterr().out == f"held-out [loss] 5.5\nstep  20/600  {LINE}\n"


def test_skipped_steps_are_shown_once_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.step(dataclasses.replace(SHOWN, skipped_count=3))
    assert capsys.readouterr().out.endswith("left 4:50  skipped 3\n")


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Reports(TrainConfig(), is_first_rank=False) as reports:
        reports.note("text")
        reports.step(SHOWN)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_panel_and_the_last_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        assert isinstance(reports._panel, Panel)
        reports.step(SHOWN)
        panel = terminal.getvalue()
        reports.note("a [note] with brackets")
        reports.step(dataclasses.replace(SHOWN, step=600))
        reports.note("after")
    assert all(part in panel for part in ("step 20/600", "2.5000", "12,346", "13.0 MiB", "4:50"))
    text = terminal.getvalue()
    assert "a [note] with brackets" in text
    assert "step 600/600  loss 2.5000" in text
    assert text.endswith("after\n")


class Report:
    def bytes(self, *, tier: str) -> int:
        return {"device": 10, "cpu": 20, "nvme": 0}[tier]


def test_tiers_without_bytes_are_left_out() -> None:
    report: Any = Report()
    assert bytes_by_tier(report) == {"device": 10, "cpu": 20}


def test_time_left_at_the_pace_so_far() -> None:
    progress = Progress(
        step=20,
        steps=100,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_second=1.0,
        seconds=10.0,
        skipped_count=0,
        bytes_by_tier={},
    )
    assert progress.seconds_left == 40


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (9.6, "0:10"), (125, "2:05"), (3725, "1:02:05")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
