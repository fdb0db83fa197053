"""While data is read it is told how far that is, who waits for another process says so, and Ctrl-C leaves no half."""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Shape, find_all, read_data
from penstock.cli.training.data.sequences import prepared as module
from penstock.cli.training.data.sequences.prepared import prepare
from penstock.cli.training.interruption import Ended, Interruption
from penstock.cli.training.reporting import display
from penstock.cli.training.reporting.reports import Reports
from penstock.integrations.tokenizers import ByteTokenizer
from tests.unit.cli.sequences.samples import Sample, sample

SHAPE = Shape(vocab_size=257, seq_length=16, batch_size=1, packed=True, holds_out=False)


def read(folder: Path, *names: str) -> list[str]:
    told: list[str] = []
    config = TrainConfig(data=names, out=folder)
    read_data(config, find_all(config), ByteTokenizer(), SHAPE, config.cache_folder, told.append)
    return told


def test_rows_and_tokens_of_each_source_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_PROGRESS_SECONDS", 0.0)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text('{"text": "12345678901234567890"}\n' * 3)
    told = read(tmp_path, "a.jsonl", "b.jsonl")
    assert told[0] == "a.jsonl: 1 rows are read, 21 tokens"
    assert told[-1] == "b.jsonl: 3 rows are read, 63 tokens"
    assert read(tmp_path, "a.jsonl") == []  # found, and not read again


def test_who_waits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRESS_SECONDS", 0.05)
    other = FileLock(tmp_path / "f0.lock", thread_local=False)
    other.acquire()
    waits: list[int] = []

    def waiting() -> None:
        waits.append(1)
        if len(waits) == 3:
            other.release()

    found = prepare(tmp_path, "f0", lambda: iter([sample([1, 2])]), vocab_size=9, waiting=waiting)
    assert found.ids.tolist() == [1, 2]
    assert len(waits) == 3
    assert not FileLock(tmp_path / "f0.lock").is_locked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_data_is_read_leaves_no_half(tmp_path: Path, number: int) -> None:
    def samples() -> Iterator[Sample]:
        yield sample(np.arange(8))
        os.kill(os.getpid(), number)
        threading.Event().wait(5)
        yield sample([1])

    with Interruption(), pytest.raises(Ended):
        prepare(tmp_path, "f0", samples, vocab_size=9)
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == []
    # The next one is not held up.
    assert prepare(tmp_path, "f0", lambda: iter([sample([1])]), vocab_size=9).row_count == 1


def test_without_a_terminal_a_line_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with Reports(TrainConfig(), is_first_rank=True) as reports, Reports(TrainConfig(), is_first_rank=False) as others:
        for now[0] in (1.0, 9.9, 10.0, 19.0, 21.0):
            reports.passing(f"at {now[0]}")
            others.passing("no")
    assert capsys.readouterr().out == "at 10.0\nat 21.0\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Reports(TrainConfig(), is_first_rank=True) as reports:
        reports.passing("[red]10 rows")
        reports.passing("20 rows")
        reports.note("stays")
        text = terminal.getvalue()
    first, second, stays = text.index("[red]10 rows"), text.index("20 rows"), text.index("stays")
    assert "\x1b[2K" in text[first:second]  # the line before is taken away
    assert "\x1b[2K" in text[text.rindex("20 rows") : stays]
    assert text.startswith("stays\n", stays)
    assert "rows" not in text[stays:]
