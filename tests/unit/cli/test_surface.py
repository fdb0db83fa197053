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

PLAN = {
    "--model": "tiny",
    "--batch": None,
    "--accumulation": 1,
    "--trust-remote-code": False,
    "--lora": "",
    **dict.fromkeys(("--precision", "--chunked-loss", "--recompute", "--packing"), "auto"),
    "--pad-vocab-to": 1,
    "--stage": 3,
    **dict.fromkeys(("--params", "--grads", "--optimizer", "--activations", "--overlap"), "auto"),
    "--options": None,
    "--optimizer-name": "adamw",
    "--optimizer-args": None,
    "--max-grad-norm": 1.0,
    "--machine": "",
    "--gpus": 1,
    "--hosts": 1,
    "--mesh": None,
    "--device-memory": None,
    "--host-memory": None,
    "--folders": None,
    "--what-if": None,
    "--measure": False,
    "--max-step": None,
    "--tbw": None,
    "--explain": False,
    "--out": "None",
    "--trace": None,
    "--json": False,
    "--compare": None,
}
EXPORT = {
    "checkpoint": None,
    "out": None,
    "--dtype": "bf16",
    "--adapters-only": True,
    "--no-adapters-only": True,
    "--merge-adapters": False,
    "--base": None,
    "--max-shard-bytes": "5GB",
    "--average": False,
}
INSPECT = {"path": None, "--verify": False, "--json": False}
REPORT = {"runs": None, "--out": "None"}
IMPORT = {"folder": None, "out": None}
IMPORT_DCP = IMPORT | {"--buffer": None}
CONVERT = {"file": None, "--out": "None", "--json": False}
LAUNCH = {"script": None, "arguments": None, "--config": "", "-m": False, "--nproc-per-node": ""}
PROBE = {"--folders": None, "--seconds": 60.0, "--out": "None", "--json": False}
DOCTOR = {"--folders": None, "--json": False}
COMMANDS = {
    "train": {},
    "plan": PLAN,
    "export": EXPORT,
    "inspect": INSPECT,
    "report": REPORT,
    "import-deepspeed": IMPORT,
    "import-dcp": IMPORT_DCP,
    "convert-config": CONVERT,
    "launch": LAUNCH,
    "probe": PROBE,
    "doctor": DOCTOR,
}

HEAVY = ("torch", "numpy", "transformers", "tensorboard", "datasets", "peft", "accelerate", "trl", "yaml")


def options(command: Any) -> dict[str, Any]:
    return {
        name: str(p.default) if name == "--out" else p.default
        for p in command.params
        for name in [*p.opts, *p.secondary_opts]
    }


def test_commands() -> None:
    group: Any = typer.main.get_command(app)
    assert group.commands.keys() == COMMANDS.keys()
    assert options(group) == {"--version": False}


@pytest.mark.parametrize("command", COMMANDS)
def test_options(command: str) -> None:
    group: Any = typer.main.get_command(app)
    assert options(group.commands[command]) == COMMANDS[command]


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
    typed = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS if name not in ("train", "data"))]
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
