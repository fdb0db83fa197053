"""`penstock doctor`: whether this machine is fit to train on, what is slow on it, and how to mend it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import values

if TYPE_CHECKING:
    from penstock.doctor import Finding

_COLOURS = {"fine": "green", "slow": "yellow", "broken": "red"}


def doctor(
    folders: Annotated[
        list[Path] | None, typer.Option(help="A folder of the nvme tier, once for each disk.", parser=values.path)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and no table.")] = False,
) -> None:
    """Look at this machine: versions, devices, memory, limits and disks; what is slow or broken, and how to mend it.

    Nothing is measured (penstock probe does that) and nothing changed. Exit status 1 if something is broken.
    """
    # Here, not at the top: it imports torch, which --help does not wait for.
    from penstock.doctor import Verdict, examine

    found = examine(folders or ())
    is_broken = any(finding.verdict is Verdict.BROKEN for finding in found)
    if as_json:
        print(json.dumps({"broken": is_broken, "findings": [finding._asdict() for finding in found]}, indent=2))
    else:
        _show(found)
    if is_broken:
        raise typer.Exit(1)


def _show(found: "list[Finding]") -> None:
    """Print what was found as a table, and what to do below each line that asks for it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in found:
        verdict = Text(finding.verdict, style=_COLOURS[finding.verdict])
        # As text: what it says of the machine may look like markup.
        table.add_row(Text(finding.about), verdict, Text(finding.found))
        if finding.mend:
            table.add_row("", "", Text(finding.mend, style="bold"))
    console = Console(highlight=False)
    console.print(table)
    wanting = sum(bool(finding.mend) for finding in found)
    console.print(Text(f"{wanting} to mend." if wanting else "All is as it should be."))
