"""Checkpoints made of what another library has saved: every parameter is a unit of its own, written tile by tile."""

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint import held
from penstock.checkpoint.cleaning import settle
from penstock.checkpoint.fields import to_bytes
from penstock.checkpoint.folder import (
    FILE_MODE,
    check_free,
    commit,
    data_name,
    make_folder,
    next_serial,
    remove_file,
    remove_folders,
    table_name,
    tensors_name,
    write_file,
)
from penstock.checkpoint.manifest import (
    FileEntry,
    Manifest,
    RankFiles,
    SavedGroup,
    SavedParameter,
    tensors_to_bytes,
)
from penstock.checkpoint.tables import HomeTable, RankTable, UnitTable
from penstock.checkpoint.values import encode
from penstock.checkpoint.writing import write_failed
from penstock.errors import CheckpointError
from penstock.kinds import MASTER, OPTIMIZER, PARAM, Tier
from penstock.layout import ALIGNMENT_NUMEL, Slot, round_up
from penstock.machine.aio import File, Queue
from penstock.machine.arena import page_aligned
from penstock.machine.border import crossing
from penstock.rules.rule import StateSpec
from penstock.tiers.home import CellPlan

_TILE_NUMEL = 1 << 20

#: Gives elements `start` to `stop` of a parameter or of one of its states, counted as if it were flat.
Read = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Incoming:
    """A parameter, wherever its values are.

    Attributes:
        name: as the model names it.
        shape: whole.
        dtype: of a frozen parameter, which is kept in it. Of a trained one, fp32.
        step: how often it was updated.
        values: at master precision.
        states: of the optimizer, fp32, by name; none of a frozen parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    step: int
    values: Read
    states: Mapping[str, Read]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@crossing
def write_checkpoint(
    folder: Path,
    parameters: Sequence[Incoming],
    *,
    rule: str,
    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    buffers: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    most_bytes: int = 1 << 62,
) -> None:
    """Write a checkpoint that `Optimizer.load` reads.

    Arguments:
        folder: must not exist, or be empty.
        parameters: all of the model's, those that are tied once.
        rule: the optimizer's name, for messages.
        groups: names of the parameters of each param group, and its options.
        buffers: of the model's state, by name.
        extra: what `load` returns.
        most_bytes: that the tiles may take, for values that say of themselves how large they are.

    Raises:
        ConfigError: the folder has something in it, or `extra` holds what no checkpoint does.
        CheckpointError: it cannot be written, or is larger than `most_bytes`; the folder is as it was then.
    """
    needed = sum(_table(parameter, 0).nbytes for parameter in parameters)
    if needed > most_bytes:
        raise CheckpointError(
            f"The checkpoint to import would take {needed:,} bytes, far more than its files have: it is not what was "
            "saved."
        )
    check_free(folder, "Import into")
    tensors = {f"buffer.{name}": buffer.contiguous() for name, buffer in buffers.items()}
    encoded = encode(dict(extra), tensors, what="extra")
    saved_groups = [
        SavedGroup(tuple(names), encode(dict(options), tensors, what=f"param_groups[{number}]"))
        for number, (names, options) in enumerate(groups)
    ]
    token = secrets.token_hex(4)
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as undo:
        undo.callback(remove_folders, make_folder(folder))
        hold = closing.enter_context(held.shared(folder))
        data, tables = _write_tiles(folder / data_name(token, 0), parameters, undo)
        table_file = folder / table_name(token, 0)
        table = write_file(table_file, to_bytes(RankTable(tuple(tables), None).to_json()))
        undo.callback(remove_file, table_file)
        beside = None
        if tensors:
            beside = write_file(folder / tensors_name(token), tensors_to_bytes(tensors))
            undo.callback(remove_file, folder / tensors_name(token))
        names = {name for parameter in parameters for name in parameter.states}
        manifest = Manifest(
            serial=next_serial(folder),
            token=token,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={name: version(name) for name in ("penstock", "torch")},
            ranks=(RankFiles(data, table),),
            tensors=beside,
            rule=rule,
            states=tuple(StateSpec(name) for name in sorted(names)),
            parameters={parameter.name: _saved(parameter) for parameter in parameters},
            groups=tuple(saved_groups),
            buffers={name: f"buffer.{name}" for name in buffers},
            loss_scale=None,
            model={},
            extra=encoded,
        )
        commit(folder, manifest)
        undo.pop_all()
        settle(folder, hold)


def _saved(parameter: Incoming) -> SavedParameter:
    trained = bool(parameter.states)
    return SavedParameter(parameter.shape, parameter.dtype, trained, parameter.step, {}, parameter.step > 0)


def _write_tiles(
    path: Path, parameters: Sequence[Incoming], undo: contextlib.ExitStack
) -> tuple[FileEntry, list[UnitTable]]:
    tables = []
    offset = 0
    for parameter in parameters:
        tables.append(_table(parameter, offset))
        offset += tables[-1].nbytes
    try:
        with Queue() as queue, File(queue, path, offset, FILE_MODE) as file:
            undo.callback(remove_file, path)
            file.lock()
            for number, (table, parameter) in enumerate(zip(tables, parameters, strict=True)):
                buffer = page_aligned(table.largest_tile_bytes)
                checksums = [_write_tile(file, table, tile, parameter, buffer) for tile in table.tiles]
                tables[number] = table.with_checksums(checksums)
            file.sync()
    except OSError as error:
        raise write_failed(path, error) from error
    return FileEntry(path.name, offset, 0), tables


def _table(parameter: Incoming, offset: int) -> UnitTable:
    homes = {MASTER if parameter.states else PARAM: {MASTER if parameter.states else PARAM: parameter.dtype}}
    if parameter.states:
        homes[OPTIMIZER] = dict.fromkeys(sorted(parameter.states), torch.float32)
    numel = round_up(max(parameter.numel, 1), ALIGNMENT_NUMEL)
    tile_numel = min(numel, _TILE_NUMEL)
    return UnitTable(
        name=parameter.name,
        slots=(Slot(parameter.name, parameter.shape, parameter.numel, 0),),
        shard_start=0,
        shard_numel=numel,
        tile_numel=tile_numel,
        first_tile=0,
        homes=tuple(
            HomeTable(home, tuple(CellPlan(parameter.name, k, Tier.NVME, d, 0) for k, d in kinds.items()), ())
            for home, kinds in homes.items()
        ),
        offset=offset,
        checksums=((0,) * len(homes),) * -(-numel // tile_numel),
    )


def _write_tile(file: File, table: UnitTable, tile: int, parameter: Incoming, buffer: Tensor) -> list[int]:
    """Write a tile; the checksums of its extents."""
    reads = {MASTER: parameter.values, PARAM: parameter.values, **parameter.states}
    start, stop = table.tile_range(tile)
    last = min(stop, parameter.numel)
    buffer.zero_()  # what is beyond the parameter
    transfers = []
    used = 0
    for home, extent in zip(table.homes, table.extents(tile), strict=True):
        part = buffer[used : used + extent.nbytes]
        used += extent.nbytes
        for cell, values in zip(home.cells, home.layout.views(part, stop - start), strict=True):
            values[: last - start].copy_(reads[cell.kind](start, last))
        transfers.append(file.write(extent.offset, part, what=f"{home.name} of '{table.name}', tile {tile}"))
    for transfer in transfers:
        transfer.wait()
    return [transfer.checksum for transfer in transfers]
