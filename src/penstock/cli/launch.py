"""`penstock launch`: a script or a module, as it is, whose `transformers.Trainer` trains by Penstock."""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import ConfigError

_MOST_PROCESSES = 1024  # on one host


def launch(
    script: Annotated[str, typer.Argument(help="A Python file that trains with transformers' Trainer, or TRL's.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    config: Annotated[str, typer.Option(help="A JSON or YAML file of arguments of penstock.prepare().")] = "",
    is_module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as of python -m: -m trl sft --config sft.yaml.")
    ] = False,
    nproc_per_node: Annotated[
        str, typer.Option(help="Processes to start by torchrun: a number, or gpu for one per GPU.")
    ] = "",
) -> None:
    """Run a script whose Trainer trains models larger than GPU memory.

    In its process the name transformers.Trainer stands for a subclass on Penstock, before the script runs; trainers of
    TRL are made of that one. Nothing else is changed. Options of this command come before the script, those of the
    script behind it. With several processes: --nproc-per-node, or torchrun ... -m penstock launch --config p.yaml s.py

    -m trl NAME runs the script of TRL's command of that name in this process, in place of accelerate's launcher.
    """
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        raise ConfigError(
            "penstock launch needs transformers and accelerate. Install them with: pip install 'penstock[integrations]'"
        )
    if not config:
        raise ConfigError(
            "--config is missing: the file that says what is where, such as 'placement: {optimizer: cpu}'."
        )
    file = Path(config)
    if is_module:
        sys.path[0] = os.getcwd()  # as python -m does
        if not _is_there(script):
            raise ConfigError(f"-m {script}: there is no module of this name.")
    elif not Path(script).is_file():
        raise ConfigError(f"{script} is no file. Name the script, and its arguments behind it.")
    from penstock.integrations.arguments import read_arguments  # torch, which --help does not wait for

    read_arguments(file)  # one error here, before many processes have it
    given = arguments or []
    if nproc_per_node:
        _start_processes(nproc_per_node, file, [*(["-m"] if is_module else []), script, *given])
    _train_by_penstock(file)
    sys.argv = [script, *given]
    if not is_module:
        sys.path[0] = str(Path(script).resolve().parent)
        _run(partial(runpy.run_path, script, run_name="__main__"))
    elif script == "trl":
        _run(_script_of_trl(given))
    else:
        _run(partial(runpy.run_module, script, run_name="__main__", alter_sys=True))


def _is_there(module: str) -> bool:
    """Return True if a module can be found. Imports the packages that it is in."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _start_processes(count: str, file: Path, script: list[str]) -> None:
    """Replace this process by torchrun, which starts the command in each of several."""
    if "RANK" in os.environ:
        raise ConfigError("--nproc-per-node inside torchrun: it has started the processes. Leave the option out.")
    if count != "gpu" and not (count.isascii() and count.isdigit() and 0 < int(count) <= _MOST_PROCESSES):
        raise ConfigError(f"--nproc-per-node {count!r}: use a number of processes to {_MOST_PROCESSES}, or gpu.")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    command += ["-m", "penstock", "launch", "--config", str(file), *script]
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


def _script_of_trl(arguments: list[str]) -> Callable[[], Any]:
    """Read the arguments of a training command of TRL, as its script does, and return what trains.

    Raises:
        ConfigError: it is no such command; or an option, on the command line or in the file, is none of the script's.
    """
    from trl.cli.commands import get_commands
    from trl.cli.commands.training import TrainingCommand

    names = [command.name for command in get_commands() if isinstance(command, TrainingCommand)]
    if not arguments or arguments[0] not in names:
        raise ConfigError(f"-m trl {' '.join(arguments[:1])}: use a training command of TRL: {', '.join(names)}.")
    name, *rest = arguments
    script = import_module(f"trl.scripts.{name}")
    *parsed, of_file, typed = script.make_parser(prog=f"trl {name}").parse_args_and_config(
        rest, return_remaining_strings=True, separate_remaining_strings=True
    )
    if of_file or typed:
        options = [word for word in (*of_file, *typed) if word.startswith("-")] or typed
        raise ConfigError(
            f"trl {name} has no {', '.join(options)}. Options of accelerate's launcher have no place here: "
            "--nproc-per-node or torchrun start processes, and the file of penstock launch --config says what is where."
        )
    return partial(script.main, *parsed)


def _run(work: Callable[[], Any]) -> None:
    """Run a script as Python does. An exception is shown as Python shows it, and ends the command with status 1."""
    try:
        work()
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise typer.Exit(1) from None
