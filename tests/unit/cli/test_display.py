import dataclasses
import io
import sys

import pytest

from penstock.cli.training.display import LiveDisplay, PlainDisplay, open_display
from penstock.cli.training.progress import Progress

PROGRESS = Progress(
    step=20,
    steps=600,
    loss=2.5,
    grad_norm=0.75,
    lr=1e-3,
    tokens_per_second=12345.6,
    seconds=10.0,
    skipped_count=0,
    bytes_by_tier={"device": 5 << 20, "cpu": 13 << 20},
)
LINE = "loss 2.5000  grad norm 0.750  lr 1.00e-03  tokens/s 12,346  state device 5.0 MiB cpu 13.0 MiB  left 4:50"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(is_first_rank=True) as display:
        display.note("held-out [loss] 5.5")
        display.show(PROGRESS)
    assert capsys.readouterr().out == f"held-out [loss] 5.5\nstep  20/600  {LINE}\n"


def test_skipped_steps_are_shown_once_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay().show(dataclasses.replace(PROGRESS, skipped_count=3))
    assert capsys.readouterr().out.endswith("left 4:50  skipped 3\n")


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(is_first_rank=False) as display:
        display.note("text")
        display.show(PROGRESS)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_panel_and_the_last_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with open_display(is_first_rank=True) as display:
        assert isinstance(display, LiveDisplay)
        display.show(PROGRESS)
        panel = terminal.getvalue()
        display.note("a [note] with brackets")
        display.show(dataclasses.replace(PROGRESS, step=600))
        display.note("after")
    assert all(part in panel for part in ("step 20/600", "2.5000", "12,346", "13.0 MiB", "4:50"))
    text = terminal.getvalue()
    assert "a [note] with brackets" in text
    assert "step 600/600  loss 2.5000" in text
    assert text.endswith("after\n")
