"""`penstock probe`: what this machine can do, measured and kept for plans."""

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import values
from penstock.errors import ConfigError, one_line

_MOST_SECONDS = 3600
_LOOKED_AT = 1 << 16


def probe(
    folders: Annotated[
        list[Path] | None, typer.Option(help="A folder of the nvme tier, once for each disk.", parser=values.path)
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long it may take.", min=1, max=_MOST_SECONDS)] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The JSON file to write, for --machine.",
            parser=values.path,
            show_default="the cache, where plans look",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and no table.")] = False,
) -> None:
    """Measure this machine: arithmetic, memory, updates, links and disks. penstock plan reads what it finds.

    What is measured in a folder is gone afterwards. The file can be edited, or written by hand for another machine.

    With several processes, which measure what is between them: torchrun --nproc-per-node 4 -m penstock probe
    """
    if out is not None:
        values.check_target("--out", out)
        if out.is_file() and not _is_machine(out):
            raise ConfigError(f"--out {one_line(str(out))} is there, and no machine's file. Name another file.")
    # Here, not at the top: it imports torch, which --help does not wait for.
    from penstock.cli.group import joined
    from penstock.planner import this_machine

    with joined() as rank, values.status() as say:
        machine = this_machine.probe(folders=folders or (), seconds=seconds, progress=say)
    if rank:
        return
    if out is None:
        written = this_machine.remember(machine)
    else:
        machine.write(out)
        written = out
    if as_json:
        print(json.dumps(machine.to_dict()))
    else:
        print(machine)
        print(f"written to {written}" if written else "not kept: the cache cannot be written; name --out")


def _is_machine(path: Path) -> bool:
    """Return True if a file looks like a machine's, which may be replaced."""
    with path.open("rb") as file:
        return b'"penstock": "machine"' in file.read(_LOOKED_AT)
