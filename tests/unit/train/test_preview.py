"""Rows for people: what is learned can be told from what is not, whatever the data holds."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console

from penstock.train.data import read_data
from penstock.train.preview import MOST_TOKENS, show, visible
from tests.unit.train.chats import assistant, plain_tokenizer, user
from tests.unit.train.runs import MARKED, config, request


def printed(rows: list[dict[str, Any]], folder: Path, coloured: bool = False, **fields: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, color_system="standard" if coloured else None, force_terminal=coloured, width=20)
    show(Dataset.from_list(rows), plain_tokenizer(MARKED), config(folder, **fields), console)
    return file.getvalue()


CHAT = {"messages": [user("[bold]Hi[/]"), assistant("Hello")]}


def test_brackets_or_green_say_what_is_learned(tmp_path: Path) -> None:
    assert printed([CHAT], tmp_path, assistant_only_loss=True) == (
        "row 1\n<|im_start|>user↵\n[bold]Hi[/]<|im_end|>↵\n<|im_start|>assistant↵\n⟦Hello<|im_end|>↵\n⟧\n\n"
        "the first 1 rows have 37 tokens, at most 37; none of them is cut\n"
    )
    shown = printed([CHAT], tmp_path, coloured=True, assistant_only_loss=True)
    assert "\x1b[32mHello<|im_end|>↵" in shown
    assert "⟦" not in shown


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_length": 4}, "⟦abcd⟧"),
        ({"max_length": 4, "truncation_mode": "keep_end"}, "⟦hij<|endoftext|>⟧"),
        ({"max_length": 4, "packing": True, "packing_strategy": "wrapped"}, "⟦abcdefghij<|endoftext|>⟧"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_cut_is_not_shown_but_counted(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    shown = printed([{"text": "abcdefghij"}, {"text": "a"}, {"text": "b"}], tmp_path, **fields)
    assert shown.startswith(f"row 1\n{said}\n\nrow 2\n⟦a<|endoftext|>⟧\n\n")
    lost = "none of them is cut" if "packing_strategy" in fields else "1 of them lose 7 to --max_length 4"
    assert shown.endswith(f"\nthe first 3 rows have 15 tokens, at most 11; {lost}\n")


def test_rows_say_where_they_are_from(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\nWhat?,⟦That\x1b[2J\n")
    asked = request(tmp_path, tmp_path / "a.csv")
    file = io.StringIO()
    data = read_data(asked, plain_tokenizer())
    show(data.train, plain_tokenizer(), asked.training, Console(file=file, color_system=None, width=20))
    first = file.getvalue().split("\n\n")[0]
    assert first == f"{tmp_path / 'a.csv'}, row 1\nWhat?⟦\\u27e6That\\x1b[2J<|endoftext|>⟧"


def test_the_middle_of_a_long_row_is_left_out(tmp_path: Path) -> None:
    text = "a" * MOST_TOKENS + "b" * 100
    shown = printed([{"prompt": "", "completion": text}], tmp_path, max_length=None)
    half = MOST_TOKENS // 2
    end = f"{'a' * (half - 101)}{'b' * 100}<|endoftext|>"
    assert shown.split("\n")[1] == f"⟦{'a' * half}⟧ [... 101 tokens ...] ⟦{end}⟧"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", "a↵\nb"), ("\x1b[2J\r\x07\x00", "\\x1b[2J\\r\\x07\\x00"), ("\u202eevil\ud800", "\\u202eevil\\ud800")],
)
def test_what_would_steer_a_terminal_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_run_says_what_its_length_cuts(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--max_length", 4, steps=1) == 0
    assert "of them lose" in capsys.readouterr().err
    assert train("--max_length", 64, "--resume_from_checkpoint", "false", steps=1) == 0
    assert "rows have" not in capsys.readouterr().err
