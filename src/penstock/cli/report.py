"""`penstock report`: a page of a run, or of two side by side."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import values
from penstock.errors import ConfigError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="The folder of a run; two are held against each other.", parser=values.path),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file.", parser=values.path, show_default="report.html in the folder of the run"),
    ] = None,
) -> None:
    """Make a page of a run: curves, memory by tier, the timeline of a step, where every byte was, settings, samples.

    A run is the folder of a penstock train, or of an optimizer.record in a loop of your own, also while it goes on. The
    page is one file that needs no network. Two runs have their curves in the same charts.
    """
    if len(runs) > 2:
        raise ConfigError(f"penstock report takes one run, or two to hold against each other, not {len(runs)}.")
    # Here, not at the top: --help needs none of it.
    from penstock.cli.reporting.page import write_page

    print(f"{write_page(runs, out)}: open it in a browser")
