"""The application: its commands, `--version`, and how a user's mistake is shown."""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from penstock.cli.export import export
from penstock.cli.import_deepspeed import import_deepspeed
from penstock.cli.inspect import inspect
from penstock.cli.train import train
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Train PyTorch models larger than GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
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


app.command()(train)
app.command()(export)
app.command()(inspect)
app.command()(import_deepspeed)


def main() -> None:
    """Run the command line. A user's mistake is one line on stderr and exit status 2, never a traceback."""
    # Before torch reads it: threads that spin while they wait cost several times the step on a cpu that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except PenstockError as error:
        # Ranks mostly fail alike, but a file can be missing on one host only: every rank speaks, with its name.
        rank = os.environ.get("RANK", "0")
        who = "" if rank == "0" else f" [rank {rank}]"
        print(f"penstock{who}: error: {error}", file=sys.stderr)
        sys.exit(2)
