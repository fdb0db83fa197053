"""Data and templates that cannot be trained on end the command by one line, which names the file and its row."""

import contextlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.instruct import PLAIN, chat_file, conversations, instruct_folder
from tests.support import run_ranks

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
)
TALK = conversations(3)
SAID = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return instruct_folder(tmp_path_factory.mktemp("bad") / "model", template=PLAIN, **SIZES)


@pytest.fixture(scope="module")
def untemplated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return instruct_folder(tmp_path_factory.mktemp("bad") / "base", template=None, **SIZES)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def noise(nbytes: int) -> bytes:
    return random.Random(0).randbytes(nbytes)


# The file's name, what is in it, other options, and what the line says besides.
DATA: dict[str, tuple[str, bytes, list[str], list[str]]] = {
    "binary as text": ("a.txt", b"\x7fELF" + noise(400), [], ["a.txt", "UTF-8"]),
    "binary in the middle of text": ("a.txt", b"words\n" * 9 + b"\xff\xfe" + noise(9), [], ["a.txt"]),
    "zeros": ("a.txt", bytes(300), [], ["a.txt"]),
    "binary as rows": ("a.jsonl", noise(400), [], ["a.jsonl"]),
    "binary as a table": ("a.parquet", noise(400), [], ["a.parquet"]),
    "binary as arrow": ("a.arrow", noise(400), [], ["a.arrow"]),
    "binary as compressed": ("a.jsonl.gz", noise(400), [], ["a.jsonl.gz"]),
    "a pickle": ("a.txt", b"\x80\x04\x95" + noise(60), [], ["a.txt"]),
    "no text": ("a.txt", b"", [], ["a.txt"]),
    "no rows": ("a.jsonl", b"", [], ["a.jsonl"]),
    "blank rows": ("a.jsonl", b"\n\n  \n", [], ["a.jsonl"]),
    "no rows in a list": ("a.json", b"[]", [], ["a.json"]),
    "a header alone": ("a.csv", b"prompt,completion\n", [], ["a.csv"]),
    "no table": ("a.parquet", b"", [], ["a.parquet"]),
    "half a row": ("a.jsonl", lines(*TALK[:2]) + b'{"messages": [{"role"', [], ["a.jsonl:3"]),
    "a row that is a list": ("a.jsonl", lines(TALK[0], [1, 2]), [], ["a.jsonl:2", "list"]),
    "a row without fields": ("a.jsonl", lines(TALK[0], {}), [], ["a.jsonl:2"]),
    "a row of other fields": ("a.jsonl", lines(TALK[0], {"body": "text"}), [], ["a.jsonl:2", "'body'", "--text-field"]),
    "a column of other fields": ("a.csv", b"body,size\nwords,3\n", [], ["a.csv:2", "--text-field"]),
    "messages that are none": (
        "a.jsonl",
        lines(TALK[0], {"messages": "hello"}),
        [],
        ["a.jsonl:2", "'messages' is text that is not JSON"],
    ),
    "no messages": ("a.jsonl", lines(TALK[0], {"messages": []}), [], ["a.jsonl:2", "no messages"]),
    "a message without a role": ("a.jsonl", lines({"messages": [{"content": "hi"}]}), [], ["a.jsonl:1", "'role'"]),
    "nothing of the assistant": ("a.jsonl", lines(*TALK, {"messages": [SAID]}), [], ["a.jsonl:4", "assistant"]),
    "a preference pair": (
        "a.jsonl",
        lines(TALK[0], {"prompt": "a", "chosen": "b", "rejected": "c"}),
        [],
        ["a.jsonl:2", "preference pair", "docs/trl.md"],
    ),
    "a prompt alone": ("a.jsonl", lines({"prompt": "a"}), [], ["a.jsonl:1"]),
    "half a character": ("a.jsonl", b'{"text": "a \\ud800 b"}\n', [], ["a.jsonl:1", "half a character"]),
    "a row that is too long": (
        "a.jsonl",
        lines(*TALK[1:3], TALK[0]),
        ["--seq-length", "60", "--truncation", "error"],
        ["a.jsonl:3", "--seq-length 60", "--truncation"],
    ),
    "a text that is too long": (
        "a.txt",
        b"words " * 90,
        ["--seq-length", "60", "--truncation", "error"],
        ["a.txt", "--seq-length 60"],
    ),
    "rows of which nothing is left": ("a.jsonl", lines(*TALK), ["--seq-length", "8"], ["a.jsonl"]),
}


def assert_one_line(text: str, said: list[str]) -> None:
    assert text.startswith("penstock: error: "), text
    assert text.count("\n") == 1
    assert len(text) < 700
    assert "Traceback" not in text
    for words in said:
        assert words in text


def refused(command: Callable[..., Any], model: Path, file: Path, *rest: str) -> str:
    """What the command says of a file, and of what stands behind it on the command line."""
    common = ["--precision", "fp32", "--eval-sequences", "0", "--sample-tokens", "0", "--seq-length", "128"]
    outcome = command("train", "--model", str(model), "--out", "out", *common, "--data", str(file), *rest)
    assert outcome.exit_code == 2, outcome.err
    assert not any(Path("out").glob("*.json*")), "nothing was begun"
    return str(outcome.err)


@pytest.mark.parametrize("case", DATA)
def test_bad_data_is_refused_by_file_and_row(
    penstock_command: Callable[..., Any], model: Path, tmp_path: Path, case: str
) -> None:
    name, content, options, said = DATA[case]
    (tmp_path / name).write_bytes(content)
    assert_one_line(refused(penstock_command, model, tmp_path / name, *options), said)


TEMPLATES = {
    "raises": ("{{ raise_exception('never') }}", ["a.jsonl:1", "never"]),
    "alternating": (ALTERNATING, ["a.jsonl:3", "must alternate"]),
    "no template": ("{% if %}", ["--chat-template", "t.jinja", "no Jinja template"]),
    "an unknown filter": ("{{ messages | nothing }}", ["t.jinja", "nothing"]),
    "says nothing": ("words", ["a.jsonl:1"]),
    "a range without end": ("{% for n in range(10**12) %}x{% endfor %}", ["a.jsonl:1"]),
    "no message": ("{{ messages[7].content }}", ["a.jsonl:1"]),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_does_not_do_is_refused(
    penstock_command: Callable[..., Any], model: Path, tmp_path: Path, case: str
) -> None:
    template, said = TEMPLATES[case]
    twice = {"messages": [SAID, *TALK[1]["messages"]]}
    (tmp_path / "t.jinja").write_text(template)
    file = chat_file(tmp_path / "a.jsonl", [*TALK[:2], twice])
    assert_one_line(refused(penstock_command, model, file, "--chat-template", str(tmp_path / "t.jinja")), said)


def test_conversations_need_a_template(penstock_command: Callable[..., Any], untemplated: Path, tmp_path: Path) -> None:
    file = chat_file(tmp_path / "a.jsonl", TALK)
    assert_one_line(refused(penstock_command, untemplated, file), ["a.jsonl:1", "chat template", "--chat-template"])


def test_the_second_of_two_files_is_the_one_that_is_named(
    penstock_command: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    good = chat_file(tmp_path / "good.jsonl", TALK)
    (tmp_path / "bad.jsonl").write_bytes(lines(*TALK, {"body": 1}))
    text = refused(penstock_command, model, good, str(tmp_path / "bad.jsonl"))
    assert_one_line(text, ["bad.jsonl:4"])


def refuse_in_rank(rank: int, folder: Path, arguments: list[str]) -> int:
    """The command in this rank; what it says is in a file."""
    from penstock.cli import main

    sys.argv = ["penstock", *arguments]
    with (folder / f"said{rank}").open("w") as said, contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def test_every_rank_names_the_same_row(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(*TALK, {"body": "text"}))
    arguments = ["train", "--model", str(model), "--data", str(file), "--out", str(tmp_path / "out"), "--seq-length"]
    assert run_ranks(refuse_in_rank, 2, tmp_path, [*arguments, "128"]) == [2, 2]
    first, second = ((tmp_path / f"said{rank}").read_text() for rank in range(2))
    assert_one_line(first, ["a.jsonl:4", "'body'"])
    assert second == first.replace("penstock: error", "penstock [rank 1]: error")
