"""`penstock import-dcp`: a checkpoint of FSDP2, or of another user of torch.distributed.checkpoint, made into ours."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import values


def import_dcp(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder with .metadata, or accelerate's with pytorch_model_fsdp_0.", parser=values.path),
    ],
    out: Annotated[
        Path, typer.Argument(help="The checkpoint to write. It must not exist, or be empty.", parser=values.path)
    ],
    buffer: Annotated[
        list[str] | None,
        typer.Option(help="A buffer's name, * for anything: files do not tell buffers from frozen parameters."),
    ] = None,
) -> None:
    """Make a checkpoint of torch.distributed.checkpoint into one that training loads, on any number of ranks."""
    from penstock.ext.interop.dcp import import_checkpoint  # torch, which --help does not wait for

    import_checkpoint(folder, out, buffers=buffer or ())
    print(out)
