"""`penstock export`: a checkpoint's weights as files that other libraries load."""

from typing import Annotated

import typer

from penstock.cli.parse import parse_path, parse_size_bytes


def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint, or a folder of them for the newest.")],
    out: Annotated[str, typer.Argument(help="The folder to write. It must not exist, or be empty.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: fp32, bf16 or fp16.")] = "bf16",
    adapters_only: Annotated[
        bool,
        typer.Option(help="Of a model with LoRA adapters, write the adapters alone, or the model they adapt as well."),
    ] = True,
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters", help="Write the model with its LoRA adapters merged into it.")
    ] = False,
    base: Annotated[
        str, typer.Option(help="The folder that a frozen base came from, of a checkpoint that leaves it out.")
    ] = "",
    max_shard_bytes: Annotated[str, typer.Option(help="Size of a file at most.")] = "5GB",
    average: Annotated[
        bool, typer.Option("--average", help="Write the average (penstock.EMA) of what was trained.")
    ] = False,
) -> None:
    """Write a checkpoint's weights so that from_pretrained loads them.

    Needs memory for a few tiles, no device and no model. With several processes, which divide the files: torchrun
    --nproc-per-node 4 -m penstock export CHECKPOINT OUT
    """
    source, target = parse_path(checkpoint, option="CHECKPOINT"), parse_path(out, option="OUT")
    of_base = parse_path(base, option="--base") if base else None
    most_bytes = parse_size_bytes(max_shard_bytes, option="--max-shard-bytes")
    import penstock
    from penstock.cli.ranks import Ranks, joined  # torch, which --help does not wait for

    ranks = Ranks.from_environment()
    with joined(ranks):
        penstock.export(
            source,
            target,
            dtype=dtype,  # type: ignore[arg-type]
            adapters_only=adapters_only,
            max_shard_bytes=most_bytes,
            average=average,
            merge_adapters=merge_adapters,
            base=of_base,
        )
    if ranks.is_first:
        print(out)
