"""The command line as its users type it, frozen: an option is added or taken away on purpose only."""

import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import typer.main

from penstock.cli.app import UNREAD, app, train
from tests.unit.cli.test_hostile_options import TABLE

#: What an option is that is not given, by command; the others are nothing, or false.
DEFAULTS: dict[str, dict[str, Any]] = {
    "plan": {
        "--model": "tiny",
        **dict.fromkeys(("--accumulation", "--pad-vocab-to", "--gpus", "--hosts"), 1),
        **dict.fromkeys(("--precision", "--chunked-loss", "--recompute", "--packing", "--overlap"), "auto"),
        **dict.fromkeys(("--params", "--grads", "--optimizer", "--activations"), "auto"),
        **{"--stage": 3, "--optimizer-name": "adamw", "--max-grad-norm": 1.0},
    },
    "export": {"--dtype": "bf16", "--adapters-only": True, "--no-adapters-only": True, "--max-shard-bytes": "5GB"},
    "probe": {"--seconds": 60.0},
}

HEAVY = ("torch", "numpy", "transformers", "tensorboard", "datasets", "peft", "accelerate", "trl", "yaml")


def options(command: Any) -> dict[str, Any]:
    return {name: p.default for p in command.params for name in [*p.opts, *p.secondary_opts]}


def test_options_and_defaults() -> None:
    """That each option is meant: `test_hostile_options.py` has a row of every one, and of no other."""
    group: Any = typer.main.get_command(app)
    assert options(group) == {"--version": False}
    found = {command: options(group.commands[command]) for command in group.commands}
    assert {name: set(given) for name, given in found.items()} == {name: set(rows) for name, rows in TABLE.items()}
    given = {
        command: {name: value for name, value in defaults.items() if value and name != "--out"}
        for command, defaults in found.items()
    }
    assert {command: defaults for command, defaults in given.items() if defaults} == DEFAULTS


@pytest.mark.parametrize("status", [0, 75])
def test_train_reads_what_is_typed_by_itself(monkeypatch: Any, status: int) -> None:
    given: list[list[str]] = []
    fake = types.ModuleType("penstock.train")
    vars(fake)["main"] = lambda words: given.append(words) or status
    monkeypatch.setitem(sys.modules, "penstock.train", fake)
    other = typer.Typer()
    other.command("train", context_settings=UNREAD)(train)
    other.command()(lambda: None)
    words = [*("--data", "a", "b", "--learning-rate", "-1e-3", "--help", "-h", "--version", "--no-such=1")]
    words += ["x.jsonl:0.5", "--config", "run.yaml"]
    assert other(["train", *words, ""], standalone_mode=False) == status
    assert given == [[*words, ""]]


def test_version(penstock_command: Callable[..., Any]) -> None:
    outcome = penstock_command("--version")
    assert (outcome.exit_code, outcome.out) == (0, f"penstock {version('penstock')}\n")


def test_help_and_version_import_nothing_heavy() -> None:
    typed = [["--help"], ["--version"], *([name, "--help"] for name in TABLE if name != "train")]
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        f"for words in {typed!r}:\n"
        "    sys.argv = ['penstock', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        assert not stop.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-shard-bytes" in done.stdout
    assert done.stdout.endswith("LOADED []\n")
