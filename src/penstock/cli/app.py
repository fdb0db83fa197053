"""The application: its commands, `--version`, and how a user's mistake is shown."""

import io
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from penstock.cli.convert_config import convert_config
from penstock.cli.doctor import doctor
from penstock.cli.export import export
from penstock.cli.import_dcp import import_dcp
from penstock.cli.import_deepspeed import import_deepspeed
from penstock.cli.inspect import inspect
from penstock.cli.launch import launch
from penstock.cli.plan import plan
from penstock.cli.probe import probe
from penstock.cli.report import report
from penstock.errors import PenstockError, one_line

_MOST_CHARS = 2000
#: What follows the command is read by the command itself, --help too.
UNREAD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="penstock",
    help="Train PyTorch models larger than GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, as the callback of `--version`."""
    if wanted:
        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models larger than GPU memory."""


def train(context: typer.Context) -> None:
    """Train a causal language model by TRL's SFTTrainer, larger than GPU memory. See penstock train --help."""
    # Here, not at the top: it imports torch, transformers and TRL.
    raise typer.Exit(import_module("penstock.train").main(context.args))


app.command(context_settings=UNREAD)(train)
app.command()(plan)
app.command()(export)
app.command()(inspect)
app.command()(report)
app.command()(import_deepspeed)
app.command()(import_dcp)
# What follows the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command()(convert_config)
app.command()(probe)
app.command()(doctor)


def main() -> None:
    """Run the command line. A user's mistake is one line on stderr and exit status 2, never a traceback."""
    # Before torch reads it: threads that spin while they wait cost several times the step on a cpu that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have bytes that no encoding has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except PenstockError as error:
        _end(str(error))
    except typer.Abort:
        _end("interrupted", code=130)
    except RecursionError:
        _end("a file holds values that are nested too deeply. Name another one.")
    except MemoryError as error:
        _end(f"the host has too little memory ({one_line(error)}). Use smaller batches or sequences, or more ranks.")
    except OSError as error:
        _end(f"{error.filename or 'A file'}: {error.strerror or error}. Check the path, its space and its permissions.")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        if not hasattr(error, "format_message"):  # the command line's own, of a module that typer has moved before
            raise
        _end(f"{error.format_message()} See --help.")
    sys.exit(code or 0)


def _end(text: str, *, code: int = 2) -> NoReturn:
    """Print one line to stderr and exit."""
    # Ranks mostly fail alike, but a file can be missing on one host only: every rank speaks, with its name.
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f" [rank {rank}]"
    print(f"penstock{who}: error: {one_line(' '.join(text.split()), _MOST_CHARS)}", file=sys.stderr)
    sys.exit(code)
