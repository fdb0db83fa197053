"""`penstock import-deepspeed`: a checkpoint of DeepSpeed made into one of Penstock."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import values


def import_deepspeed(
    folder: Annotated[
        Path, typer.Argument(help="What save_checkpoint was given, or a tag's folder in it.", parser=values.path)
    ],
    out: Annotated[
        Path, typer.Argument(help="The checkpoint to write. It must not exist, or be empty.", parser=values.path)
    ],
) -> None:
    """Make a checkpoint of DeepSpeed's ZeRO stage 1, 2 or 3 into one that training loads, on any number of ranks."""
    from penstock.ext.interop.deepspeed import import_checkpoint  # torch, which --help does not wait for

    import_checkpoint(folder, out)
    print(out)
