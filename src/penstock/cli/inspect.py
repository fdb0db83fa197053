"""`penstock inspect`: what a checkpoint holds, and whether it is still what was written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import values
from penstock.errors import one_line

_MOST_CHARS = 160


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them for the newest.", parser=values.path)],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every tile and say which are damaged; exit status 1 if any is.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint holds: steps, parameters, optimizer, where state rested, files."""
    from penstock.integrations.engine_internals import Checkpoint, damaged_tiles, summarize

    checkpoint = Checkpoint.open(path)
    summary = summarize(checkpoint)
    damaged = [str(error) for error in damaged_tiles(checkpoint)] if verify else None
    if as_json:
        print(json.dumps(summary if damaged is None else summary | {"damaged": damaged}, indent=2))
    else:
        _show(summary)
        for error in damaged or ():
            print(error)
        if damaged is not None:
            print(f"{len(damaged)} damaged" if damaged else "Every tile is as it was written.")
    if damaged:
        raise typer.Exit(1)


def _show(summary: Mapping[str, Any]) -> None:
    """Print a summary as tables."""
    from rich.console import Console

    console = Console(highlight=False)
    parameters, steps, optimizer = summary["parameters"], summary["steps"], summary["optimizer"]
    same = steps["least"] == steps["greatest"]
    facts = [
        ("checkpoint", summary["path"]),
        ("created", summary["created"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items())),
        ("world size", summary["world_size"]),
        ("model", summary["model"]),
        ("steps", f"{steps['least']:,}" if same else f"{steps['least']:,} to {steps['greatest']:,}, by parameter"),
        ("parameters", f"{parameters['numel']:,} in {parameters['count']:,} tensors"),
        ("trained", f"{parameters['trained_numel']:,} in {parameters['trained']:,} tensors"),
        *((("left out", f"{left_out:,} of them, frozen"),) if (left_out := parameters["left_out_numel"]) else ()),
        *((("divided", f"{divided:,} tensors, saved in parts"),) if (divided := parameters["divided"]) else ()),
        ("buffers", summary["buffers"]),
        ("optimizer", optimizer["rule"]),
        *((f"group {number}", _line(group)) for number, group in enumerate(optimizer["groups"])),
        ("loss scale", _line(summary["loss_scale"])),
        *((f"extra {name}", _line(value)) for name, value in summary["extra"].items()),
    ]
    console.print(_table(("", ""), facts))
    kinds = [(row["kind"], row["dtype"], f"{row['bytes']:,}") for row in summary["kinds"]]
    console.print(_table(("kind", "dtype", "bytes"), kinds))
    tiers = [(row["home"], row["tier"], f"{row['bytes']:,}") for row in summary["tiers"]]
    console.print(_table(("rested", "tier", "bytes"), tiers))
    files = [(row["name"], f"{row['bytes']:,}") for row in summary["files"]]
    console.print(_table(("file", "bytes"), [*files, ("total", f"{summary['bytes']:,}")]))


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    """Make a table without lines between its cells. Columns of bytes are numbers, and stand to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(titles), pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title == "bytes" else "left")
    for row in rows:
        table.add_row(*(Text(one_line(str(value))) for value in row))  # as they are: a name may look like markup
    table.add_row()
    return table


def _line(value: object) -> str:
    """Write a value in a line that is not too long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + "..."
