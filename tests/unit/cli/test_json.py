"""`--json`: standard output of the process is JSON and nothing else, whatever C code prints."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import penstock
from penstock.cli.app import app

#: Of each command that has the option: what is typed, and a key of what it prints.
COMMANDS = {
    "convert-config": ("config.json", "notes"),
    "doctor": ("--folders .", "findings"),
    "inspect": ("step --verify", "damaged"),
    # With too little room on the device, so that a solver is asked.
    "plan": ("--batch 2x16 --machine rtx4090-desktop --what-if device_memory=3000000", "fits"),
    "probe": ("--seconds 1 --out machine.json", "figures"),
}


def test_every_command_with_the_option_is_here() -> None:
    group = typer.main.get_command(app)
    found = {name for name, each in group.commands.items() if any("--json" in p.opts for p in each.params)}  # type: ignore[attr-defined]
    assert found == COMMANDS.keys()


# Of the others, tests in one process read what Python prints.
@pytest.mark.parametrize("command", ["plan", "probe"])
def test_standard_output_is_json_and_nothing_else(command: str, tmp_path: Path) -> None:
    if command == "inspect":
        model = nn.Linear(8, 8)
        optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
        optimizer.save(tmp_path / "step")
        optimizer.close()
    (tmp_path / "config.json").write_text('{"zero_optimization": {"stage": 2}}')
    words, key = COMMANDS[command]
    typed = [sys.executable, "-m", "penstock", command, *words.split(), "--json"]
    done = subprocess.run(typed, capture_output=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode in (0, 1), done.stderr.decode()
    assert key in json.loads(done.stdout)


@pytest.mark.parametrize("words", ["inspect nowhere", "plan --machine nowhere", "plan --gpus 0", "probe --out /"])
def test_an_error_is_on_standard_error(penstock_command: Callable[..., Any], words: str) -> None:
    outcome = penstock_command(*words.split(), "--json")
    assert (outcome.exit_code, outcome.out) == (2, "")
    assert outcome.err.startswith("penstock: error: ")
    assert outcome.err.count("\n") == 1
