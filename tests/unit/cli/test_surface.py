"""The command line as its users type it, frozen: an option is added or taken away on purpose only."""

import dataclasses
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli.app import UNREAD, app, train_over_trl
from penstock.cli.options import option_of
from penstock.cli.training.config import DataConfig, TrainConfig

TRAIN = {
    "--config": "",
    "--model": "tiny",
    "--trust-remote-code": False,
    "--lora": "",
    "--precision": "auto",
    "--chunked-loss": "auto",
    "--recompute": "off",
    "--compile": False,
    "--pad-vocab-to": 1,
    "--data": None,
    "--eval-data": None,
    "--text-field": "text",
    "--chat-template": "",
    "--seq-length": None,
    "--truncation": "auto",
    "--packing": "auto",
    "--cache": "",
    "--seed": 0,
    "--plan": "",
    "--dp-replicate": 1,
    "--cp": 1,
    "--stage": 3,
    "--params": "device",
    "--grads": "device",
    "--optimizer": "cpu",
    "--activations": "off",
    "--nvme-path": None,
    "--overlap": "auto",
    "--device-bytes": None,
    "--tile-bytes": None,
    "--live-bytes": None,
    "--prefetch-bytes": None,
    "--persistent-bytes": None,
    "--pinned-bytes": None,
    "--host-bytes": None,
    "--update-threads": None,
    "--streamed-updates": None,
    "--state-dtype": None,
    "--gather-format": None,
    "--reduce-format": None,
    "--secondary-shard": None,
    "--timeout-s": None,
    "--optimizer-name": "adamw",
    "--optimizer-args": None,
    "--lr": None,
    "--betas": None,
    "--weight-decay": None,
    "--max-grad-norm": 1.0,
    "--schedule": "cosine",
    "--min-lr": 0.1,
    "--warmup": None,
    "--steps": None,
    "--epochs": None,
    "--batch-size": None,
    "--accumulation": None,
    "--global-batch": None,
    "--out": "penstock-out",
    "--dry-run": False,
    "--eval-every": 0,
    "--eval-sequences": 256,
    "--keep-best": False,
    "--early-stop": 0,
    "--sample-tokens": 200,
    "--prompt": None,
    "--log-every": 20,
    "--save-every": 0,
    "--keep": 2,
    "--resume": "",
    "--report-to": None,
    "--peak-flops": None,
}
#: Names of before, each with the words that say the same now.
BEFORE = {
    "--jsonl-field x": "--text-field x",
    "--activation-checkpointing": "--recompute on",
    "--tensorboard": "--report-to tensorboard",
}
DATA = {
    "--config": "",
    "--model": "tiny",
    "--trust-remote-code": False,
    "--data": None,
    "--eval-data": None,
    "--text-field": "text",
    "--chat-template": "",
    "--seq-length": None,
    "--truncation": "auto",
    "--packing": "auto",
    "--cache": "",
    "--seed": 0,
    "--show": 3,
}
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
LAUNCH = {"script": None, "arguments": None, "--config": "", "--nproc-per-node": ""}
PROBE = {"--folders": None, "--seconds": 60.0, "--out": "None", "--json": False}
DOCTOR = {"--folders": None, "--json": False}
COMMANDS = {
    "train": TRAIN,
    "data": DATA,
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

HEAVY = ("torch", "numpy", "transformers", "tensorboard", "datasets", "peft", "accelerate", "trl", "yaml", "highspy")


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


@pytest.mark.parametrize(("command", "settings"), [("train", TrainConfig), ("data", DataConfig)])
def test_the_options_are_exactly_the_fields_of_the_settings(command: str, settings: Any) -> None:
    """Each once, in the order of the fields, behind the file that may hold them."""
    group: Any = typer.main.get_command(app)
    parameters = group.commands[command].params
    assert [(p.name, p.opts, p.secondary_opts) for p in parameters] == [
        ("config", ["--config"], []),
        *((field.name, [option_of(field.name)], []) for field in dataclasses.fields(settings)),
    ]


def test_every_field_of_a_look_at_data_is_one_of_a_run() -> None:
    of_run = {field.name: field.type for field in dataclasses.fields(TrainConfig)}
    of_look = {field.name: field.type for field in dataclasses.fields(DataConfig)}
    assert of_look.pop("show") is int
    assert of_look.items() <= of_run.items()


def settings_of_runs(monkeypatch: Any) -> list[TrainConfig]:
    """The settings of runs that end at once."""
    configs: list[TrainConfig] = []

    def run(config: TrainConfig, interruption: object) -> bool:
        configs.append(config)
        return True

    monkeypatch.setattr("penstock.cli.training.run.run", run)
    return configs


def test_defaults_of_the_command_are_those_of_its_settings(
    penstock_command: Callable[..., Any], monkeypatch: Any
) -> None:
    configs = settings_of_runs(monkeypatch)
    assert penstock_command("train").exit_code == 0
    assert configs == [TrainConfig()]


#: Every option of train, and what it makes of its field.
GIVEN: dict[str, tuple[str, Any]] = {
    "--model": ("m", "m"),
    "--trust-remote-code": ("", True),
    "--lora": ("r=4", "r=4"),
    "--precision": ("fp16", "fp16"),
    "--chunked-loss": ("off", "off"),
    "--recompute": ("auto", "auto"),
    "--compile": ("", True),
    "--pad-vocab-to": ("64", 64),
    "--data": ("a:0.5 b:0.5", ("a:0.5", "b:0.5")),
    "--eval-data": ("c d", ("c", "d")),
    "--text-field": ("body", "body"),
    "--chat-template": ("t.jinja", "t.jinja"),
    "--seq-length": ("32", 32),
    "--truncation": ("left", "left"),
    "--packing": ("on", "on"),
    "--cache": ("k", "k"),
    "--seed": ("7", 7),
    "--dp-replicate": ("2", 2),
    "--cp": ("2", 2),
    "--stage": ("1", 1),
    "--params": ("cpu", "cpu"),
    "--grads": ("nvme", "nvme"),
    "--optimizer": ("device=0.5,cpu=0.5", {"device": 0.5, "cpu": 0.5}),
    "--activations": ("cpu", "cpu"),
    "--nvme-path": ("p q", ("p", "q")),
    "--overlap": ("none", "none"),
    "--device-bytes": ("20GiB", 20 * 2**30),
    "--tile-bytes": ("1MiB", 2**20),
    "--live-bytes": ("2MiB", 2**21),
    "--prefetch-bytes": ("0", 0),
    "--persistent-bytes": ("5", 5),
    "--pinned-bytes": ("1GiB", 2**30),
    "--host-bytes": ("64GiB", 64 * 2**30),
    "--update-threads": ("3", 3),
    "--streamed-updates": ("auto", "auto"),
    "--state-dtype": ("int8", "int8"),
    "--gather-format": ("int8", "int8"),
    "--reduce-format": ("int4", "int4"),
    "--secondary-shard": ("2", 2),
    "--timeout-s": ("30", 30.0),
    "--optimizer-name": ("lion", "lion"),
    "--optimizer-args": ("eps=1 x=2", ("eps=1", "x=2")),
    "--lr": ("0.1", 0.1),
    "--betas": ("0.8,0.9", (0.8, 0.9)),
    "--weight-decay": ("0", 0.0),
    "--max-grad-norm": ("0", None),
    "--schedule": ("linear", "linear"),
    "--min-lr": ("0.5", 0.5),
    "--warmup": ("2", 2.0),
    "--steps": ("9", 9),
    "--batch-size": ("4", 4),
    "--accumulation": ("2", 2),
    "--global-batch": ("16", 16),
    "--out": ("o", Path("o")),
    "--dry-run": ("", True),
    "--eval-every": ("6", 6),
    "--eval-sequences": ("8", 8),
    "--keep-best": ("", True),
    "--early-stop": ("5", 5),
    "--sample-tokens": ("0", 0),
    "--prompt": ("hello you", ("hello", "you")),
    "--log-every": ("3", 3),
    "--save-every": ("5", 5),
    "--keep": ("4", 4),
    "--resume": ("auto", "auto"),
    "--report-to": ("wandb mlflow", ("wandb", "mlflow")),
    "--peak-flops": ("1e12", 1e12),
}
EPOCHS = {"--epochs": ("2", 2.0)}  # in place of the steps
BY_PLAN = {"--plan": ("auto", "auto")}  # in place of homes


def test_every_option_reaches_its_setting(penstock_command: Callable[..., Any], monkeypatch: Any) -> None:
    configs = settings_of_runs(monkeypatch)
    assert {"--config"} | GIVEN.keys() | EPOCHS.keys() | BY_PLAN.keys() == TRAIN.keys()
    words = [word for option, (typed, _) in GIVEN.items() for word in (option, *typed.split())]
    outcome = penstock_command("train", *words)
    assert outcome.exit_code == 0, outcome.err
    assert vars(configs[0]) == {option[2:].replace("-", "_"): value for option, (_, value) in GIVEN.items()} | {
        "epochs": None,
        "plan": "",
    }
    assert penstock_command("train", "--epochs", "2", "--plan", "auto").exit_code == 0
    assert configs[1] == TrainConfig(epochs=2.0, plan="auto")


@pytest.mark.parametrize(("before", "now"), BEFORE.items())
def test_names_of_before_are_read_and_said(
    penstock_command: Callable[..., Any], monkeypatch: Any, before: str, now: str
) -> None:
    configs = settings_of_runs(monkeypatch)
    outcome = penstock_command("train", *before.split())
    assert outcome.exit_code == 0, outcome.err
    assert outcome.err.startswith(f"penstock: note: {before.split()[0]} is ")
    assert outcome.err.count("\n") == 1
    assert now.split()[0] in outcome.err
    assert penstock_command("train", *now.split()).err == ""
    assert configs[0] == configs[1] != TrainConfig()


def test_names_of_before_are_no_part_of_the_help(penstock_command: Callable[..., Any]) -> None:
    shown = penstock_command("train", "--help").out
    assert not [name for name in BEFORE if name.split()[0] in shown]


def test_notes_are_of_the_first_rank(penstock_command: Callable[..., Any], monkeypatch: Any) -> None:
    settings_of_runs(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    assert penstock_command("train", "--tensorboard").err == ""


@pytest.mark.parametrize("status", [0, 75])
def test_train_over_trl_reads_what_is_typed_by_itself(monkeypatch: Any, status: int) -> None:
    given: list[list[str]] = []
    fake = types.ModuleType("penstock.train")
    vars(fake)["main"] = lambda words: given.append(words) or status
    monkeypatch.setitem(sys.modules, "penstock.train", fake)
    other = typer.Typer()
    other.command("train", context_settings=UNREAD)(train_over_trl)
    other.command()(lambda: None)
    words = [
        "--data",
        "a",
        "b",
        "--learning-rate",
        "-1e-3",
        "--help",
        "-h",
        "--version",
        "--no-such=1",
        "x.jsonl:0.5",
        "--config",
        "run.yaml",
    ]
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


def test_an_unknown_option_is_a_usage_error(penstock_command: Callable[..., Any]) -> None:
    outcome = penstock_command("train", "--data", "a", "b", "--epoch", "3")
    assert outcome.exit_code == 2
    assert "--epoch" in outcome.err
    assert "--epochs" in outcome.err
    assert outcome.err.count("\n") == 1
