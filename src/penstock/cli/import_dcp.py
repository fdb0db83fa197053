"""`penstock import-dcp`: a checkpoint of FSDP2, or of another user of torch.distributed.checkpoint, made into ours."""

from typing import Annotated

import typer

from penstock.cli.parse import parse_path


def import_dcp(
    folder: Annotated[str, typer.Argument(help="A folder with .metadata, or accelerate's with pytorch_model_fsdp_0.")],
    out: Annotated[str, typer.Argument(help="The checkpoint to write. It must not exist, or be empty.")],
    buffer: Annotated[
        list[str] | None,
        typer.Option(help="A buffer's name, * for anything: files do not tell buffers from frozen parameters."),
    ] = None,
) -> None:
    """Make a checkpoint of torch.distributed.checkpoint into one that training loads, on any number of ranks."""
    source, target = parse_path(folder, option="FOLDER"), parse_path(out, option="OUT")
    from penstock.integrations.dcp import import_checkpoint  # torch, which --help does not wait for

    import_checkpoint(source, target, buffers=buffer or ())
    print(out)
