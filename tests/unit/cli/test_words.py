"""What is typed, as typer reads it."""

import re

import pytest

from penstock.cli.options import Option
from penstock.cli.words import arrange
from penstock.errors import ConfigError

OPTIONS = {
    "data": Option("", many=True),
    "packing": Option("", bare="on", choices=("auto", "on", "off")),
    "lr": Option(""),
    "text_field": Option("", before=("--jsonl-field",)),
    "report_to": Option("", many=True, before=("--tensorboard=tensorboard",)),
}


@pytest.mark.parametrize(
    ("typed", "arranged"),
    [
        ([], []),
        (["--data", "a.jsonl:0.7", "b.parquet:0.3"], ["--data=a.jsonl:0.7", "--data=b.parquet:0.3"]),
        (["--data", "a", "--lr", "1", "--data", "b"], ["--data=a", "--lr=1", "--data=b"]),
        (["--data=a", "--data=b"], ["--data=a", "--data=b"]),
        (["--data=a", "b"], ["--data=a", "b"]),  # of which typer says that it is one too many
        (["--data=--lr"], ["--data=--lr"]),
        (["--data", "-", "-5", "-.5", "--- x", "", "- item", "-a b"], None),
        (["--packing"], ["--packing=on"]),
        (["--packing", "--lr", "1"], ["--packing=on", "--lr=1"]),
        (["--packing", "off", "--flag"], ["--packing=off", "--flag"]),
        (["--packing", "off", "x"], ["--packing=off", "x"]),
        (["--lr", "1", "x"], ["--lr=1", "x"]),
        (["--packing="], ["--packing="]),
        (["--lr", "-1"], ["--lr=-1"]),
        (["--lr", "-inf"], ["--lr=-inf"]),
        (["--lr", ""], ["--lr="]),
        (["--lr", "--"], ["--lr=--"]),
        (["--lr", "a=b"], ["--lr=a=b"]),
        (["--flag", "--unknown=3", "word"], ["--flag", "--unknown=3", "word"]),
        (["--data", "a", "--", "--lr"], ["--data=a", "--", "--lr"]),
        (["--packing", "--", "x"], ["--packing=on", "--", "x"]),
        (["--data", "a", "-x"], ["--data=a", "-x"]),
    ],
)
def test_one_word_for_each_value(typed: list[str], arranged: list[str] | None) -> None:
    wanted = [f"--data={word}" for word in typed[1:]] if arranged is None else arranged
    assert arrange(typed, OPTIONS) == (wanted, [])


@pytest.mark.parametrize(
    ("typed", "arranged", "note"),
    [
        (["--jsonl-field", "body"], ["--text-field=body"], "--jsonl-field is called --text-field now."),
        (["--jsonl-field=body"], ["--text-field=body"], "--jsonl-field is called --text-field now."),
        (
            ["--tensorboard", "--lr=1"],
            ["--report-to=tensorboard", "--lr=1"],
            "--tensorboard is --report-to tensorboard now.",
        ),
    ],
)
def test_names_of_before(typed: list[str], arranged: list[str], note: str) -> None:
    assert arrange(typed, OPTIONS) == (arranged, [note])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--data"], "--data needs a value."),
        (["--data", "--lr", "1"], "--data needs a value. One that begins with dashes is written --data=--lr."),
        (["--lr"], "--lr needs a value."),
        (["--lr", "--packing"], "--lr needs a value. One that begins with dashes is written --lr=--packing."),
        (["--data", "--"], "--data needs a value."),
        (["--tensorboard=x"], "--tensorboard takes no value, and is --report-to tensorboard now. Leave 'x' out."),
    ],
)
def test_what_lacks_its_value(typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        arrange(typed, OPTIONS)
