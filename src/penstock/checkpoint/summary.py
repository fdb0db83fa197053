"""What a checkpoint holds, for people and scripts, and whether it still is what was written."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from torch import Tensor

from penstock.checkpoint.fields import dtype_name
from penstock.checkpoint.manifest import MARKER, files_of
from penstock.checkpoint.opened import Checkpoint
from penstock.checkpoint.tiles import TileReader
from penstock.errors import CheckpointError
from penstock.layout import ALIGNMENT_NUMEL, round_up

_MOST_CHARS = 120


def summarize(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sum up a checkpoint, JSON-like; nothing but the marker and the tables is read.

    Returns:
        `path`, `created`, `versions`, `world_size`, `model`; `steps`: the least and the greatest count of a trained
        parameter; `parameters`: their count and elements, how many elements were left out, and how many parameters
        are divided, saved in parts; `optimizer`: rule, states, param groups; `kinds`: what there is of them; `tiers`:
        bytes of each home where it rested when it was saved, over all ranks; `buffers`, `loss_scale`, `extra`,
        shortened; `files`; `bytes`: of them all.
    """
    manifest = checkpoint.manifest
    saved = manifest.parameters.values()
    steps = [parameter.step for parameter in saved if parameter.trained]
    files = [{"name": entry.name, "bytes": entry.nbytes} for entry in files_of(manifest)]
    files.append({"name": MARKER, "bytes": (checkpoint.folder / MARKER).stat().st_size})
    options = [checkpoint.value(f"groups[{n}].options", group.options) for n, group in enumerate(manifest.groups)]
    return {
        "path": str(checkpoint.folder),
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "world_size": len(manifest.ranks),
        "model": manifest.model.get("class"),
        "steps": {"least": min(steps, default=0), "greatest": max(steps, default=0)},
        "parameters": {
            "count": len(manifest.parameters),
            "trained": len(steps),
            "numel": sum(prod(parameter.shape) for parameter in saved),
            "trained_numel": sum(prod(parameter.shape) for parameter in saved if parameter.trained),
            "left_out_numel": sum(prod(parameter.shape) for parameter in saved if parameter.left_out),
            "divided": len(_divided(checkpoint)),
        },
        "optimizer": {
            "rule": manifest.rule,
            "states": {state.name: dtype_name(state.dtype) for state in manifest.states},
            "groups": [
                {"parameters": len(group.parameters), "options": _shortened(checkpoint, "groups", of_group)}
                for group, of_group in zip(manifest.groups, options, strict=True)
            ],
        },
        "kinds": _kinds(checkpoint),
        "tiers": _tiers(checkpoint),
        "buffers": len(manifest.buffers),
        "loss_scale": None if manifest.loss_scale is None else dict(manifest.loss_scale),
        "extra": _shortened(checkpoint, "extra", checkpoint.value("extra", manifest.extra)),
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
    }


def damaged_tiles(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Read and verify every tile, and buffers of single ranks; for each that is not what was written, its error."""
    for rank in range(len(checkpoint.manifest.ranks)):
        try:
            checkpoint.own_tensors(rank)
        except CheckpointError as error:
            yield error
    keys = list(checkpoint.tiles())
    position = 0
    with TileReader() as reader:
        while position < len(keys):
            try:
                for _ in reader.read(keys[number] for number in range(position, len(keys))):
                    position += 1
            except CheckpointError as error:
                yield error
                position += 1


def _divided(checkpoint: Checkpoint) -> set[str]:
    """Find the parameters that ranks have saved parts of."""
    slots = (slot for table in checkpoint.tables for unit in table.units for slot in unit.slots)
    return {slot.name for slot in slots if slot.region is not None}


def _kinds(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Add up bytes by kind and dtype. Padding of parameters counts; that of shards and pages, and copies, do not.

    Of a parameter that tensor-parallel ranks have whole each has written it, and the first one's table names it.
    """
    nbytes: Counter[tuple[str, str]] = Counter()
    for unit in (unit for table in checkpoint.tables for unit in table.units if unit.checksums):
        first, last = unit.tile_range(unit.tiles[0])[0], unit.tile_range(unit.tiles[-1])[1]
        first, last = first + unit.shard_start, last + unit.shard_start
        ends = (
            (max(slot.start, first), min(slot.start + round_up(slot.numel, ALIGNMENT_NUMEL), last))
            for slot in unit.slots
        )
        named = sum(max(0, stop - start) for start, stop in ends)
        for cell in (cell for home in unit.homes for cell in home.cells):
            nbytes[cell.kind, dtype_name(cell.dtype)] += cell.part(0, named).stop * cell.dtype.itemsize
    return [{"kind": kind, "dtype": dtype, "bytes": count} for (kind, dtype), count in nbytes.items()]


def _tiers(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Add up the bytes of each home by the tier where they rested."""
    nbytes: Counter[tuple[str, str]] = Counter()
    for home in (home for table in checkpoint.tables for unit in table.units for home in unit.homes):
        for tier, count in home.tiers:
            nbytes[home.name, tier] += count
    return [{"home": home, "tier": tier, "bytes": count} for (home, tier), count in nbytes.items()]


def _shortened(checkpoint: Checkpoint, field: str, value: Any) -> Any:
    """Cut a value of the marker short, for people."""
    try:
        return _short(value)
    except RecursionError:
        raise checkpoint.fail(field, "is nested too deeply.") from None


def _short(value: Any) -> Any:
    """Make a value JSON: a tensor by its shape, a long text by its beginning."""
    if isinstance(value, Tensor):
        return f"tensor {dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        return value[:_MOST_CHARS] + "..."
    if isinstance(value, Mapping):
        return {str(key)[:_MOST_CHARS]: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value
