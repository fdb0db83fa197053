"""The command lines of the README and the pages: their programs would take them; and files are what they say."""

import json
import subprocess
import tomllib

import pytest

from tests.docs.blocks import PAGES, Block, blocks_of, every_block
from tests.docs.commands import CHECKS, COMMANDS, MIXED, Command, commands_of

#: Kinds of blocks: each is run, read, or shown as it came out of a run.
KINDS = {"python", *COMMANDS, *MIXED, "yaml", "json", "jsonl", "toml", "ini", "text"}
SCRIPTS = [block for block in every_block("bash") if block.text.startswith("#!")]
TYPED = [command for block in every_block(*COMMANDS, *MIXED) if block not in SCRIPTS for command in commands_of(block)]


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    found = [block for page in PAGES for block in blocks_of(page)]
    assert [str(block) for block in found if block.kind not in KINDS] == []


@pytest.mark.parametrize("command", TYPED, ids=str)
def test_its_program_takes_the_command(command: Command) -> None:
    pytest.importorskip("trl" if command.program in ("penstock", "torchrun") else "torch")
    CHECKS[command.program](command.words[1:])


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_the_shell_reads_the_script(script: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=script.text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", every_block("yaml", "json", "jsonl", "toml"), ids=str)
def test_a_file_of_the_page_is_read(block: Block) -> None:
    if block.kind == "yaml":
        yaml = pytest.importorskip("yaml")
        assert all(document for document in yaml.safe_load_all(block.text))
    elif block.kind == "json":
        assert json.loads(block.text)
    elif block.kind == "jsonl":
        assert all(json.loads(line) for line in block.text.splitlines())
    else:
        assert tomllib.loads(block.text)


def test_what_is_shown_as_output_has_no_command_in_it() -> None:
    """Else it would be read by nobody."""
    for block in every_block("text"):
        assert not list(commands_of(Block(block.page, block.line, "", block.text))), str(block)


def test_blocks_that_are_not_run_say_why() -> None:
    """As few as possible: a new one raises the number here."""
    left_out = {str(block): block.reason for block in every_block("python", *COMMANDS, *MIXED) if block.reason}
    assert len(left_out) <= 4, left_out


@pytest.mark.parametrize(
    "line",
    [
        "penstock nothing",
        "penstock train --no-such-option 1",
        "penstock train --learning_rate fast",
        "penstock train --optimizer moon",
        "penstock train --lr 1e-4",
        "penstock plan ... --what-if",
        "penstock inspect",
        "torchrun --no-such-option 2 -m penstock train",
        "torchrun --nproc-per-node 2 -m penstock train --no-such-option",
        "make nothing",
        "make bench FASTER=1",
        "pip install 'penstock[nothing]'",
        "python benchmarks/no_such_script.py",
        "python benchmarks/step.py --no-such-option",
    ],
)
def test_a_command_that_its_program_would_not_take_is_found(line: str) -> None:
    pytest.importorskip("trl")
    (command,) = commands_of(Block("page", 1, "sh", f"{line}  # a comment\n"))
    with pytest.raises(Exception):  # noqa: B017, PT011 - of each program its own
        CHECKS[command.program](command.words[1:])


def test_commands_are_found_between_output() -> None:
    text = "$ penstock plan --model a \\\n    --batch 1x2\nfits: yes\nPENSTOCK_CONFIG=a.yaml python my.py  # says why\n"
    found = list(commands_of(Block("page", 7, "console", text)))
    assert [(each.line, each.words) for each in found] == [
        (7, ("penstock", "plan", "--model", "a", "--batch", "1x2")),
        (10, ("python", "my.py")),
    ]
