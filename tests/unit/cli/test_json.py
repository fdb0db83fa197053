"""`--json`: standard output of the process is JSON and nothing else, whatever C code prints."""

import ctypes
import json
from pathlib import Path

import pytest
import typer.main

from penstock.cli import main
from penstock.cli.app import app
from penstock.planner import this_machine
from tests.lib.engines import prepared

#: Of each command that has the option: what is typed, and a key of what it prints.
COMMANDS = {
    "convert-config": ("config.json", "notes"),
    "doctor": ("--folders .", "findings"),
    "inspect": ("step --verify", "damaged"),
    "plan": ("--batch 2x16 --machine rtx4090-desktop --params device --optimizer device", "fits"),
    "probe": ("--seconds 1 --out machine.json", "figures"),
}


def test_every_command_with_the_option_is_here() -> None:
    group = typer.main.get_command(app)
    found = {name for name, each in group.commands.items() if any("--json" in p.opts for p in each.params)}  # type: ignore[attr-defined]
    assert found == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_standard_output_is_json_and_nothing_else(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if command == "probe":  # measuring is not what is looked at
        monkeypatch.setattr(this_machine, "measure", lambda **_: ({}, {"cpu": "x", "cores": 2, "device": "cpu"}))
    if command == "inspect":
        _, optimizer = prepared()
        optimizer.save(tmp_path / "step")
        optimizer.close()
    (tmp_path / "config.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path)
    words, key = COMMANDS[command]
    monkeypatch.setattr("sys.argv", ["penstock", command, *words.split(), "--json"])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    ctypes.CDLL(None).fflush(None)  # what C code printed waits there, else until the process ends
    said = capfd.readouterr()
    assert end.value.code in (0, 1), said.err
    assert key in json.loads(said.out)
