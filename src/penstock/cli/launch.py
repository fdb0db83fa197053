"""`penstock launch`: somebody's script, as it is, whose `transformers.Trainer` trains by Penstock."""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError

_MOST_PROCESSES = 1024  # on one host


def launch(
    script: Annotated[str, typer.Argument(help="A Python file that trains with transformers' Trainer, or TRL's.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    config: Annotated[str, typer.Option(help="A JSON or YAML file of arguments of penstock.prepare().")] = "",
    nproc_per_node: Annotated[
        str, typer.Option(help="Processes to start by torchrun: a number, or gpu for one per GPU.")
    ] = "",
) -> None:
    """Run a script whose Trainer trains models larger than GPU memory.

    In its process the name transformers.Trainer stands for a subclass on Penstock, before the script runs; trainers of
    TRL are made of that one. Nothing else is changed. Options of this command come before the script, those of the
    script behind it. With several processes: --nproc-per-node, or torchrun ... -m penstock launch --config p.yaml s.py
    """
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        raise ConfigError(
            "penstock launch needs transformers and accelerate. Install them with: pip install 'penstock[integrations]'"
        )
    if not config:
        raise ConfigError(
            "--config is missing: the file that says what is where, such as 'placement: {optimizer: cpu}'."
        )
    file, source = Path(config), Path(script)
    if not source.is_file():
        raise ConfigError(f"{script} is no file. Name the script, and its arguments behind it.")
    from penstock.integrations.arguments import read_arguments  # torch, which --help does not wait for

    read_arguments(file)  # one error here, before many processes have it
    given = arguments or []
    if nproc_per_node:
        _start_processes(nproc_per_node, file, source, given)
    _train_by_penstock(file)
    _run(source, given)


def _start_processes(count: str, file: Path, script: Path, arguments: list[str]) -> None:
    """Replace this process by torchrun, which starts the command in each of several."""
    if "RANK" in os.environ:
        raise ConfigError("--nproc-per-node inside torchrun: it has started the processes. Leave the option out.")
    if count != "gpu" and not (count.isascii() and count.isdigit() and 0 < int(count) <= _MOST_PROCESSES):
        raise ConfigError(f"--nproc-per-node {count!r}: use a number of processes to {_MOST_PROCESSES}, or gpu.")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    command += ["-m", "penstock", "launch", "--config", str(file), str(script), *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _train_by_penstock(file: Path) -> None:
    """Have `transformers.Trainer` name a class on Penstock, in this process."""
    import transformers

    from penstock.integrations.transformers import trainer_class
    from penstock.integrations.transformers.config import VARIABLE

    os.environ[VARIABLE] = str(file.resolve())  # for scripts that make a class by themselves, too
    ours = trainer_class(transformers.Trainer)
    # It is defined in a module of its own, which other trainers of transformers import it from.
    transformers.Trainer = transformers.trainer.Trainer = ours
    if os.environ.get("RANK", "0") == "0":
        print(f"penstock launch: transformers.Trainer trains by Penstock, with the arguments in {file}.", flush=True)


def _run(script: Path, arguments: list[str]) -> None:
    """Run a script as Python does. What it raises is shown as Python shows it, and ends the command with status 1."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise typer.Exit(1) from None
