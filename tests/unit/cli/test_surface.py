"""The command line as its users type it, frozen: an option is added or taken away on purpose only."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import typer.main

from penstock.cli.app import app
from penstock.cli.options import option_of
from penstock.cli.training.config import TrainConfig

TRAIN = {
    "--model": "tiny",
    "--trust-remote-code": False,
    "--data": None,
    "--jsonl-field": "text",
    "--out": "penstock-out",
    "--seed": 0,
    "--stage": 3,
    "--params": "device",
    "--grads": "device",
    "--optimizer": "cpu",
    "--nvme-path": None,
    "--precision": "auto",
    "--overlap": "auto",
    "--activation-checkpointing": False,
    "--chunked-loss": False,
    "--tile-bytes": None,
    "--live-bytes": None,
    "--prefetch-bytes": None,
    "--persistent-bytes": None,
    "--pinned-bytes": None,
    "--update-threads": None,
    "--streamed-updates": None,
    "--lr": 2e-3,
    "--weight-decay": 0.1,
    "--betas": "0.9,0.95",
    "--max-grad-norm": 1.0,
    "--warmup": None,
    "--steps": 400,
    "--batch-size": 16,
    "--accumulation": 1,
    "--seq-length": 128,
    "--eval-sequences": 256,
    "--sample-tokens": 200,
    "--prompt": "",
    "--log-every": 20,
    "--save-every": 0,
    "--keep": 2,
    "--resume": "",
    "--tensorboard": False,
}

EXPORT = {
    "checkpoint": None,
    "out": None,
    "--dtype": "bf16",
    "--adapters-only": True,
    "--no-adapters-only": True,
    "--merge-adapters": False,
    "--base": "",
    "--max-shard-bytes": "5GB",
    "--average": False,
}
INSPECT = {"path": None, "--verify": False, "--json": False}
IMPORT = {"folder": None, "out": None}
IMPORT_DCP = IMPORT | {"--buffer": None}
CONVERT = {"file": None, "--out": "None"}
LAUNCH = {"script": None, "arguments": None, "--config": "", "--nproc-per-node": ""}
COMMANDS = {
    "train": TRAIN,
    "export": EXPORT,
    "inspect": INSPECT,
    "import-deepspeed": IMPORT,
    "import-dcp": IMPORT_DCP,
    "convert-config": CONVERT,
    "launch": LAUNCH,
}

HEAVY = ("transformers", "tokenizers", "numpy.random", "tensorboard")


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


def test_the_options_of_train_are_exactly_the_fields_of_its_settings() -> None:
    """Each once, in the order of the fields, and with the default that the field has."""
    group: Any = typer.main.get_command(app)
    parameters = group.commands["train"].params
    assert [(p.name, p.opts, p.secondary_opts) for p in parameters] == [
        (field.name, [option_of(field.name)], []) for field in dataclasses.fields(TrainConfig)
    ]


def settings_of_runs(monkeypatch: Any) -> list[TrainConfig]:
    """The settings of runs that end at once."""
    configs: list[TrainConfig] = []

    def run(config: TrainConfig) -> bool:
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


def test_every_option_reaches_its_setting(penstock_command: Callable[..., Any], monkeypatch: Any) -> None:
    configs = settings_of_runs(monkeypatch)
    arguments = (
        "--model m --trust-remote-code --data a --data b --jsonl-field body --out o --seed 7 --stage 1 --params cpu "
        "--grads nvme "
        "--optimizer device=0.5,cpu=0.5 --nvme-path p --nvme-path q --precision fp32 --overlap none "
        "--activation-checkpointing --chunked-loss --tile-bytes 1MiB --live-bytes 2MiB --prefetch-bytes 0 "
        "--persistent-bytes 5 --pinned-bytes 1GiB --update-threads 3 --streamed-updates auto "
        "--lr 0.1 --weight-decay 0 --betas 0.8,0.9 "
        "--max-grad-norm 0 --warmup 2 --steps 9 --batch-size 4 --accumulation 2 --seq-length 32 --eval-sequences 8 "
        "--sample-tokens 0 --prompt hello --log-every 3 --save-every 5 --keep 4 --resume auto --tensorboard"
    )
    assert {word for word in arguments.split() if word.startswith("--")} == set(TRAIN)
    assert penstock_command("train", *arguments.split()).exit_code == 0
    (config,) = configs
    assert config.to_dict() == {
        "model": "m",
        "trust_remote_code": True,
        "data": ("a", "b"),
        "jsonl_field": "body",
        "out": "o",
        "seed": 7,
        "stage": 1,
        "params": "cpu",
        "grads": "nvme",
        "optimizer": {"device": 0.5, "cpu": 0.5},
        "nvme_path": ("p", "q"),
        "precision": "fp32",
        "overlap": "none",
        "activation_checkpointing": True,
        "chunked_loss": True,
        "options": {
            "tile_bytes": 2**20,
            "live_bytes": 2**21,
            "prefetch_bytes": 0,
            "persistent_bytes": 5,
            "pinned_bytes": 2**30,
            "update_threads": 3,
            "streamed_updates": "auto",
        },
        "lr": 0.1,
        "weight_decay": 0.0,
        "betas": (0.8, 0.9),
        "max_grad_norm": None,
        "warmup": 2,
        "steps": 9,
        "batch_size": 4,
        "accumulation": 2,
        "seq_length": 32,
        "eval_sequences": 8,
        "sample_tokens": 0,
        "save_every": 5,
        "keep": 4,
        "resume": "auto",
        "prompt": "hello",
        "log_every": 3,
        "tensorboard": True,
    }


def test_version(penstock_command: Callable[..., Any]) -> None:
    outcome = penstock_command("--version")
    assert (outcome.exit_code, outcome.out) == (0, f"penstock {version('penstock')}\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        "sys.argv = ['penstock', 'train', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--jsonl-field" in done.stdout
    assert done.stdout.endswith("LOADED []\n")


def test_an_unknown_option_is_a_usage_error(penstock_command: Callable[..., Any]) -> None:
    outcome = penstock_command("train", "--epochs", "3")
    assert outcome.exit_code == 2
    assert "--epochs" in outcome.err
