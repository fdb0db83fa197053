"""What a run tells: people on a terminal and elsewhere, programs in files."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.reporting.display import Panel
from penstock.cli.training.reporting.formats import format_bytes, format_seconds, printable
from penstock.cli.training.reporting.memory import bytes_by_tier, host_peak_bytes, take_device_peak
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.reporting.samples import Sample
from penstock.cli.training.reporting.waits import Waits

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
    token_count=1000,
)
SHOWN = dataclasses.replace(PROGRESS, tokens_per_second=12345.6, bytes_by_tier={"device": 5 << 20, "cpu": 13 << 20})
WAITS = Waits(0.12, {"fetch": 0.09, "collective": 0.03, "upload": 0.0001}, "host update")
LINE = "loss 2.5000  grad norm 0.750  lr 1.00e-03  tokens/s 12,346  state device 5.0 MiB cpu 13.0 MiB  left 4:50"


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_disk_that_is_full_ends_the_file_and_not_the_run(tmp_path: Path) -> None:
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports, Path("/dev/full").open("wb") as full:
        reports.start(world_size=2)
        reports._metrics._file = full
        with pytest.warns(UserWarning, match=r"metrics\.jsonl ends here: .*No space left"):
            reports.step(PROGRESS)
        reports.step(PROGRESS)
    assert [line["event"] for line in lines(tmp_path)] == ["start"]


def test_events_are_lines_of_json_as_they_happen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of an earlier run\n")
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start(world_size=2)
        reports.evaluation(0, 5.5, 0.25, token_name="byte")
        reports.step(PROGRESS)
        assert len(lines(tmp_path)) == 3
        reports.samples(20, [Sample("the ", "fox")])
        reports.end(loss_after=2.0)
    assert lines(tmp_path) == [
        {"event": "start", "world_size": 2},
        {"event": "eval", "step": 0, "loss": 5.5, "perplexity": math.exp(5.5), "seconds": 0.25},
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
        {"event": "sample", "step": 20, "prompt": "the ", "text": "fox"},
        {
            "event": "end",
            "loss_after": 2.0,
            "token_count": 1000,
            "peak_bytes_by_tier": {"cpu": 8},
            "best_loss": 5.5,
            "best_step": 0,
        },
    ]


def test_what_is_measured_is_in_the_line_of_its_step(tmp_path: Path) -> None:
    measured = dataclasses.replace(PROGRESS, mfu=0.5, device_peak_bytes=3, host_peak_bytes=4, waits=WAITS)
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start()
        reports.step(measured)
        reports.evaluation(20, 5.5, 0.25, token_name="byte", is_best=True)
    _, line, evaluation = lines(tmp_path)
    assert (line["mfu"], line["device_peak_bytes"], line["host_peak_bytes"]) == (0.5, 3, 4)
    assert (line["waited"], line["bound_by"]) == (0.12, "host update")
    assert line["waits"] == {"fetch": 0.09, "collective": 0.03, "upload": 0.0001}
    assert evaluation["is_best"] is True


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start()
        reports.step(dataclasses.replace(PROGRESS, grad_norm=float("nan"), loss=float("inf")))
    _, line = lines(tmp_path)
    assert line["grad_norm"] is None
    assert line["loss"] is None


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Reports(TrainConfig(out=tmp_path, report_to=("tensorboard",)), is_first_rank=False) as reports:
        reports.start()
        reports.step(PROGRESS)
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.note("held-out [loss] 5.5")
        reports.step(SHOWN)
    assert capsys.readouterr().out == f"held-out [loss] 5.5\nstep  20/600  {LINE}\n"


def test_what_is_measured_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    measured = dataclasses.replace(SHOWN, mfu=0.3821, device_peak_bytes=7 << 20, waits=WAITS)
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.step(measured)
        reports.evaluation(20, 5.5, 0.25, token_name="byte", is_best=True)
    line, evaluation = capsys.readouterr().out.splitlines()
    waited = "waited 12% (fetch: NVMe reads 9%, collective 3%), bound by host update"
    assert line.endswith(
        f"tokens/s 12,346  MFU 38.2%  state device 5.0 MiB cpu 13.0 MiB  peak 7.0 MiB  {waited}  left 4:50"
    )
    assert evaluation == ("held-out loss 5.5000 nats per byte after 20 steps, perplexity 244.7, the lowest so far")


def test_a_run_ends_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    first = dataclasses.replace(SHOWN, step=300, seconds=11.0, token_count=123456, host_peak_bytes=1 << 30, waits=WAITS)
    second = dataclasses.replace(
        SHOWN,
        step=600,
        seconds=33.0,  # 3 of them in evaluations
        tokens_per_second=200.0,
        token_count=4000,
        bytes_by_tier={"device": 6 << 20, "cpu": 1},
        waits=Waits(0.0, {"collective": 0.01}, "host update"),
    )
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        for step, loss in ((0, 5.5), (300, 2.0), (600, 2.5)):
            reports.evaluation(step, loss, 1.0, token_name="byte")
        reports.step(first)
        reports.step(second)
        capsys.readouterr()
        reports.end(model="out/folder")
    assert capsys.readouterr().out.splitlines() == [
        "steps          600/600 in 0:33, 127,456 tokens, 4,249 a second",
        "held-out loss  5.5000 after step 0, 2.5000 after step 600, lowest 2.0000 after step 300",
        "state          device 6.0 MiB cpu 13.0 MiB",
        "peak memory    process 1.0 GiB",
        "waited         6% (fetch: NVMe reads 4%, collective 2%), bound by host update",
        "model          out/folder",
    ]


def test_a_run_that_diverged_has_no_best(tmp_path: Path) -> None:
    with Reports(TrainConfig(out=tmp_path), is_first_rank=True) as reports:
        reports.start()
        reports.evaluation(0, float("nan"), 1.0, token_name="byte")
        reports.evaluation(1, 1e6, 1.0, token_name="byte")
        reports.evaluation(2, float("inf"), 1.0, token_name="byte")
        reports.end()
    _, first, second, _, end = lines(tmp_path)
    assert (first["loss"], first["perplexity"]) == (None, None)
    assert second["perplexity"] is None  # more than a float holds
    assert (end["best_loss"], end["best_step"]) == (1e6, 1)


def test_what_a_model_writes_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.samples(1, [Sample("a\x1b[2J", "b\x9bc\td\n")])
    assert capsys.readouterr().out == "sample:\na\ufffd[2Jb\ufffdc\td\n\n"
    assert printable("é\r") == "é\ufffd"


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
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERM", "xterm")
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        assert reports._display is not None
        assert isinstance(reports._display.panel, Panel)
        reports.step(SHOWN)
        panel = terminal.getvalue()
        reports.note("a [note] with brackets")
        reports.step(dataclasses.replace(SHOWN, waits=WAITS))
        before = len(terminal.getvalue())
        reports.step(SHOWN)
        again = terminal.getvalue()[before:]
        reports.step(dataclasses.replace(SHOWN, step=600))
        reports.end(model="the [model]")
        reports.note("after")
    assert all(part in panel for part in ("step 20/600", "2.5000", "12,346", "13.0 MiB", "4:50"))
    text = terminal.getvalue()
    assert "a [note] with brackets" in text
    assert "step 600/600  loss 2.5000" in text
    assert "bound by host update" in again  # stays until it is measured again
    assert "the [model]" in text
    assert text.endswith("after\n")


@pytest.mark.parametrize("ends", ["with a table", "with an error"])
def test_the_last_numbers_of_a_run_that_ends_early_stay(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERM", "xterm")
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.step(SHOWN)
        assert LINE not in terminal.getvalue()
        if ends == "with a table":
            reports.end(model="m")
    assert terminal.getvalue().count(f"step  20/600  {LINE}\n") == 1


class Report:
    def bytes(self, *, tier: str) -> int:
        return {"device": 10, "cpu": 20, "nvme": 0}[tier]


def test_tiers_without_bytes_are_left_out() -> None:
    report: Any = Report()
    assert bytes_by_tier(report) == {"device": 10, "cpu": 20}


class Counting:
    """A device's module that counts."""

    peak = 7

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 0


def test_the_peak_of_a_device_is_of_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting()
    monkeypatch.setattr(torch, "get_device_module", lambda device: counting)
    assert [take_device_peak(torch.device("cuda")) for _ in range(2)] == [7, 0]
    assert take_device_peak(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert take_device_peak(torch.device("cuda")) is None


def test_the_peak_of_the_host_is_this_process_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr("penstock.cli.training.reporting.memory._STATUS", status)
    other = host_peak_bytes()  # by getrusage
    assert other is not None
    assert 10 << 20 < other < 1 << 40
    status.write_text("Name:\tpython\nVmHWM:\t   1234 kB\nVmRSS:\t 9 kB\n")
    assert host_peak_bytes() == 1234 * 1024


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
    # Of a run that goes on the pace is that of the steps since then.
    assert dataclasses.replace(progress, begin=10).seconds_left == 80
    assert dataclasses.replace(progress, begin=10).to_dict() == progress.to_dict()


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (9.6, "0:10"), (125, "2:05"), (3725, "1:02:05")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
