"""Data for people: what is learned can be told from what is not, whatever the data holds."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.training.data.showing import MOST_CHARS, marked, show, visible


@dataclass(frozen=True)
class Run:
    text: str
    trained: bool


@dataclass(frozen=True)
class Segment:
    runs: list[Run]
    where: str = "chat.jsonl:17"
    kind: str = "messages"


CHAT = Segment([Run("<|user|>[bold]Hi[/]\n<|assistant|>", False), Run("Hello<|end|>", True), Run("\n", False)])


def printed(*sequences: list[Segment], coloured: bool = False, **statistics: Any) -> str:
    file = io.StringIO()
    system = "standard" if coloured else None
    show(sequences, statistics, Console(file=file, color_system=system, force_terminal=coloured, width=20))
    return file.getvalue()


def test_without_colour_brackets_say_what_is_learned() -> None:
    assert printed([CHAT]) == (
        "sequence 1: chat.jsonl:17 (messages)\n<|user|>[bold]Hi[/]↵\n<|assistant|>⟦Hello<|end|>⟧↵\n\n\n"
    )


def test_with_colour_it_is_green() -> None:
    shown = printed([CHAT], coloured=True)
    assert "\x1b[32mHello<|end|>\x1b[0m" in shown
    assert "\x1b[2m<|assistant|>\x1b[0m" in shown
    assert "⟦" not in shown


def test_segments_of_a_sequence_have_boundaries() -> None:
    one = Segment([Run("a", True)], where="x:1", kind="text")
    two = Segment([Run("b", True)], where="x:2", kind="text")
    assert printed([one, two], [two]) == (
        "sequence 1: x:1 (text)\n⟦a⟧\nsegment boundary: x:2 (text)\n⟦b⟧\n\nsequence 2: x:2 (text)\n⟦b⟧\n\n"
    )


def test_brackets_of_the_data_are_no_marks() -> None:
    shown = marked(Segment([Run("⟦no⟧", False), Run("⟧yes⟦", True)]), coloured=False).plain
    assert shown == "\\u27e6no\\u27e7⟦\\u27e7yes\\u27e6⟧"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("a\nb", "a↵\nb"),
        ("\x1b[2J\r\x07\x00", "\\x1b[2J\\r\\x07\\x00"),
        ("\u202eevil\ud800", "\\u202eevil\\ud800"),
        ("é ☃", "é ☃"),
    ],
)
def test_what_would_steer_a_terminal_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_where_and_kind_steer_nothing_either() -> None:
    assert "\x1b" not in printed([Segment([], where="\x1b[2J", kind="\x1b")], **{"\x1b": "\x1b"})


@pytest.mark.parametrize("cut", [0, 1, 1999, 2000, 2001, 2500, 4999, 5000])
def test_the_middle_of_a_long_text_is_left_out(cut: int) -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(MOST_CHARS + 1000))
    shown = marked(Segment([Run(text[:cut], False), Run(text[cut:], True)]), coloured=False).plain
    plain = shown.replace("⟦", "").replace("⟧", "")
    half = MOST_CHARS // 2
    assert plain == text[:half] + " [... 1,000 characters ...] " + text[-half:]


def test_a_text_that_fits_is_whole() -> None:
    text = "x" * MOST_CHARS
    assert marked(Segment([Run(text, True)]), coloured=False).plain == f"⟦{text}⟧"


def test_statistics() -> None:
    shown = printed(rows=1234567, trained_share=0.25, mean_length=12.3456, kind="text")
    assert shown == "rows           1,234,567\ntrained_share  25.0%\nmean_length    12.35\nkind           text\n"


def test_the_command(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 40)
    outcome = penstock_command("data", "--data", "a.txt", "--seq-length", "16", "--show", "2")
    assert outcome.exit_code == 0, outcome.err
    assert outcome.out.startswith(
        "sequence 1: a.txt:1 (text)\nt⟦he quick brown ⟧\n\nsequence 2: a.txt:1 (text)\n ⟦fox the quick b⟧\n\nrows"
    )
    assert re.search(r"^rows +1$", outcome.out, re.MULTILINE)
    assert [path.name for path in (tmp_path / "penstock-out").iterdir()] == ["cache"], "where the run finds it"


def test_zero_shows_the_numbers_alone(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 40)
    outcome = penstock_command("data", "--data", "a.txt", "--seq-length", "16", "--show", "0")
    assert outcome.out.startswith("rows of text ")
