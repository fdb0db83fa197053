"""The command lines of the pages, as a shell reads them, and whether the programs they name would take them."""

import re
import shlex
import subprocess
import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from torch.distributed.run import get_args_parser
from typer.main import get_command

from penstock.cli.app import app
from penstock.cli.request import Request
from tests.docs.blocks import ROOT, Block

#: Kinds of blocks that have nothing but commands in them, and those that have them between other things.
COMMANDS, MIXED = ("sh", "bash"), ("", "console")
#: What a page writes for what the reader has typed before.
LEFT_OUT = "..."
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Command:
    """A command of a page: its words, without the variables that are set for it alone, and the line it is on."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def program(self) -> str:
        return self.words[0]


def commands_of(block: Block) -> Iterator[Command]:
    """Find the commands of a block: all its lines, or those that begin with a program where output is shown too."""
    lines = block.text.replace("\\\n", "\0").splitlines()
    number = block.line
    for line in lines:
        typed = line.replace("\0", " ").removeprefix("$ ")
        words = _words(typed) if block.kind in COMMANDS or _PROGRAM.match(typed) else []
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in ("$", "export")):
            words = words[1:]
        if words:
            yield Command(block.page, number, tuple(words))
        number += 1 + line.count("\0")


def _words(line: str) -> list[str]:
    """Split a line as a shell does, without its comment."""
    return shlex.split(line, comments=True)


def check_penstock(words: tuple[str, ...]) -> None:
    """Read a command line of ours with the parser that reads it, up to the first look at a file."""
    if words[0] == "train":
        check_train(words[1:])
        return
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    partial = LEFT_OUT in words
    typed = [word for word in words[1:] if word != LEFT_OUT]
    # Without the words that are left out, a command may lack an argument.
    lacks = partial and any(each.required for each in command.params)
    context = command.make_context(words[0], typed, resilient_parsing=lacks)
    if words[0] == "plan" and not partial:
        Request(**context.params)


def check_train(words: tuple[str, ...]) -> None:
    """Read what follows `penstock train`; the file that it names is the reader's."""
    from penstock.train.arguments import parse

    typed = [word for word in words if word != LEFT_OUT]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("model_name_or_path: path/to/model\n")
        file.flush()
        if "--config" in typed:
            typed[typed.index("--config") + 1] = file.name
        parse(typed)


def parse_torchrun(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse as torchrun does; return its options, and the words that are not its own.

    The pages name `--shutdown-timeout`, which torch has from 2.13 on, and say so: a release before is asked without.
    """
    parser = get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():
        words = re.sub(r"--shutdown-timeout[ =]\S+", "", " ".join(words)).split()
    known, rest = parser.parse_known_args(words)
    return known, rest


def check_torchrun(words: tuple[str, ...]) -> None:
    """Read a torchrun with torch's own parser, and what it starts with ours."""
    typed = [word for word in words if word != LEFT_OUT]
    if "penstock" not in typed:
        known, rest = parse_torchrun(typed)
        assert known.training_script.endswith(".py"), typed
        assert not rest
        return
    ours = typed.index("penstock")
    assert typed[ours - 1] == "-m", typed
    known, rest = parse_torchrun([*typed[: ours + 1]])
    assert (known.module, known.training_script, rest) == (True, "penstock", []), typed
    check_penstock(words[words.index("penstock") + 1 :])


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def check_make(words: tuple[str, ...]) -> None:
    """Look for the targets and for the variables that are set."""
    variables = [word.partition("=")[0] for word in words if "=" in word]
    targets = [word for word in words if "=" not in word]
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert set(targets) <= _targets(), targets
    assert all(f"$({name})" in makefile or f"$(if $({name})" in makefile for name in variables), variables


def check_pip(words: tuple[str, ...]) -> None:
    """Look for the extras that are named."""
    assert words[0] == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        named = re.fullmatch(r"(?:penstock|\.)\[([\w,]+)\]", word)
        assert word == "penstock" or named or word.startswith("-"), word
        assert set(named[1].split(",") if named else ()) <= extras.keys(), word


def check_python(words: tuple[str, ...]) -> None:
    """Look for a script of ours, and for its options in what it says."""
    script = next((word for word in words if word.endswith(".py")), "")
    path = ROOT / script
    if not script.startswith(("benchmarks/", "tests/", "examples/", "packaging/")):
        return  # the reader's own
    assert path.is_file(), script
    sources = "".join(each.read_text() for each in path.parent.rglob("*.py"))
    for word in words:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in sources, word


def check_bash(words: tuple[str, ...]) -> None:
    """A script of the repository, which the shell reads."""
    done = subprocess.run(["bash", "-n", words[0]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


CHECKS = {
    "bash": check_bash,
    "penstock": check_penstock,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
}
_PROGRAM = re.compile(rf"(\$ )?([A-Z_]+=\S* )*({'|'.join(CHECKS)})(?![\w.:-])")
