"""`--json`: standard output of the process is JSON and nothing else, whatever C code prints."""

import contextlib
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli import main
from penstock.cli.app import app

#: Of each command that has the option: what is typed, and a key of what it prints.
COMMANDS = {
    **dict.fromkeys(("convert-config", "doctor", "inspect"), ("", "")),
    "plan": ("--batch 2x16 --machine rtx4090-desktop --params device --optimizer device", "fits"),
    "probe": ("--seconds 1 --out machine.json", "figures"),
}


def test_every_command_with_the_option_is_here() -> None:
    group = typer.main.get_command(app)
    found = {name for name, each in group.commands.items() if any("--json" in p.opts for p in each.params)}  # type: ignore[attr-defined]
    assert found == COMMANDS.keys()


# Of the others, their own tests read what Python prints.
@pytest.mark.parametrize("command", ["plan", "probe"])
def test_standard_output_is_json_and_nothing_else(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the process writes, not what Python prints: libraries print for themselves."""
    words, key = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["penstock", command, *words.split(), "--json"])
    with contextlib.suppress(SystemExit):
        main()
    ctypes.CDLL(None).fflush(None)  # what C code printed waits there, else until the process ends
    assert key in json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("words", ["inspect nowhere", "plan --machine nowhere", "plan --gpus 0", "probe --out /"])
def test_an_error_is_on_standard_error(penstock_command: Callable[..., Any], words: str) -> None:
    outcome = penstock_command(*words.split(), "--json")
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert outcome.err.startswith("penstock: error: ")
    assert outcome.err.count("\n") == 1
