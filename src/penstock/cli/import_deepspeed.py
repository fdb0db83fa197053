"""`penstock import-deepspeed`: a checkpoint of DeepSpeed made into one of Penstock."""

from typing import Annotated

import typer

from penstock.cli.parse import parse_path


def import_deepspeed(
    folder: Annotated[str, typer.Argument(help="What save_checkpoint was given, or a tag's folder in it.")],
    out: Annotated[str, typer.Argument(help="The checkpoint to write. It must not exist, or be empty.")],
) -> None:
    """Make a checkpoint of DeepSpeed's ZeRO stage 1, 2 or 3 into one that training loads, on any number of ranks."""
    source, target = parse_path(folder, option="FOLDER"), parse_path(out, option="OUT")
    from penstock.integrations.deepspeed import import_checkpoint  # torch, which --help does not wait for

    import_checkpoint(source, target)
    print(out)
