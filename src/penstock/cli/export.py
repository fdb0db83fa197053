"""`penstock export`: a checkpoint's weights as files that other libraries load."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import values


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder of them for the newest.", parser=values.path)
    ],
    out: Annotated[
        Path, typer.Argument(help="The folder to write. It must not exist, or be empty.", parser=values.path)
    ],
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16 or fp16.")] = "bf16",
    adapters_only: Annotated[
        bool,
        typer.Option(help="Of a model with LoRA adapters, write the adapters alone, or the model they adapt as well."),
    ] = True,
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters", help="Write the model with its LoRA adapters merged into it.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            help="The folder that a frozen base came from, of a checkpoint that leaves it out.", parser=values.path
        ),
    ] = None,
    max_shard_bytes: Annotated[Any, typer.Option(help="Size of a file at most.", parser=values.size)] = "5GB",
    average: Annotated[
        bool, typer.Option("--average", help="Write the average (penstock.EMA) of what was trained.")
    ] = False,
) -> None:
    """Write a checkpoint's weights so that from_pretrained loads them.

    Needs memory for a few tiles, no device and no model. With several processes, which divide the files: torchrun
    --nproc-per-node 4 -m penstock export CHECKPOINT OUT
    """
    import penstock
    from penstock.cli.group import joined  # torch, which --help does not wait for

    with joined() as rank:
        penstock.export(
            checkpoint,
            out,
            dtype=dtype,  # type: ignore[arg-type]
            adapters_only=adapters_only,
            max_shard_bytes=max_shard_bytes,
            average=average,
            merge_adapters=merge_adapters,
            base=base,
        )
    if rank == 0:
        print(out)
