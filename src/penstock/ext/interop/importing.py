"""Checkpoints made of another library's: a save whose tiles are read from that library's files.

Every parameter is a unit of its own, with a storage of its master values and one of its states.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.beside import to_tensors
from penstock.checkpoint.folder import check_free, make_folder
from penstock.checkpoint.format import Manifest, SavedGroup, SavedParameter, encode
from penstock.checkpoint.reader import next_serial
from penstock.checkpoint.save import Save
from penstock.checkpoint.tables import HomeTable, UnitTable
from penstock.checkpoint.tiles import RingMemory, UnitSource
from penstock.config import MASTER, OPTIMIZER, PARAM, Tier
from penstock.errors import CheckpointError
from penstock.layout import ALIGNMENT_NUMEL, Slot, round_up
from penstock.rules.rule import StateSpec
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import DONE, HostEvent, InlineStreams
from penstock.tiers.storage import CellPlan, MemorySegment, SegmentPlan, Storage, Views

_CPU = torch.device("cpu")
_TILE_NUMEL = 1 << 20

#: Returns elements `start` to `stop` of a parameter or of one of its states, counted as if it were flat.
Read = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Incoming:
    """A parameter to import, and functions that read its values.

    Attributes:
        name: its name in the model.
        shape: the shape of the whole parameter.
        dtype: the dtype of a frozen parameter, which is kept in it; of a trained one, fp32.
        step: the number of its updates.
        values: returns its elements, at master precision.
        states: return the elements of each state of the optimizer, fp32, by name; empty for a frozen parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    step: int
    values: Read
    states: Mapping[str, Read]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@engine_entry
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
        folder: the checkpoint's folder; it must not exist, or be empty.
        parameters: all of the model's, those that are tied once.
        rule: the optimizer's name, for messages.
        groups: names of the parameters of each param group, and its options.
        buffers: the buffers of the model's state, by name.
        extra: the value that `load` returns.
        most_bytes: the most bytes of the tiles, for files that state their own size.

    Raises:
        ConfigError: the folder is not empty, or `extra` holds a value that no checkpoint can.
        CheckpointError: it cannot be written, or is larger than `most_bytes`; the folder is unchanged then.
    """
    needed = sum(source.table.nbytes for source in _sources(parameters))  # a generator: there may be far too many
    if needed > most_bytes:
        raise CheckpointError(
            f"The checkpoint to import would take {needed:,} bytes, far more than its files have: it is not what was "
            "saved."
        )
    check_free(folder, "Import into")
    keys, tensors = to_tensors(buffers)
    encoded = encode(dict(extra), tensors, what="extra")
    saved_groups = [
        SavedGroup(tuple(names), encode(dict(options), tensors, what=f"param_groups[{number}]"))
        for number, (names, options) in enumerate(groups)
    ]
    manifest = Manifest.new(
        serial=next_serial(folder),
        ranks=(),
        tensors=None,
        rule=rule,
        states=tuple(StateSpec(name) for name in sorted({name for p in parameters for name in p.states})),
        parameters={
            p.name: SavedParameter(p.shape, p.dtype, bool(p.states), p.step, {}, p.step > 0) for p in parameters
        },
        groups=tuple(saved_groups),
        buffers=keys,
        loss_scale=None,
        model={},
        extra=encoded,
    )
    sources = list(_sources(parameters))
    with contextlib.closing(RingMemory(sources, _CPU)) as ring, contextlib.closing(InlineStreams(_CPU)) as streams:
        Save(
            control_group=ControlGroup(),
            folder=folder,
            sources=sources,
            ring=ring,
            streams=streams,
            random=None,
            manifest=manifest,
            tensors=tensors,
            made=make_folder(folder),
            token=manifest.token,
        ).run()


class _ReadSection(MemorySegment):
    """Some kinds of one parameter, whose values are in memory only while they are copied.

    Arguments:
        plan: the segment's, which is padded as in every layout.
        numel: the number of elements of the parameter.
        reads: return the values of each kind.
    """

    def __init__(self, plan: SegmentPlan, numel: int, reads: Sequence[Read]) -> None:
        super().__init__(plan, ())
        self._numel = numel
        self._reads = reads

    def views(self, start: int, stop: int) -> Views:
        """Read the values of elements `start` to `stop`; those beyond the parameter are zeros."""
        last = min(stop, self._numel)
        values = tuple(torch.zeros(stop - start, dtype=cell.dtype, device=_CPU) for cell in self.plan.cells)
        for of_kind, read in zip(values, self._reads, strict=True):
            of_kind[: last - start].copy_(read(start, last))
        return values


def _sources(parameters: Sequence[Incoming]) -> Iterator[UnitSource]:
    """Lay parameters out one after the other in a data file, each as a unit."""
    offset = 0
    copied = HostEvent()  # one for all: no thread waits for it
    for parameter in parameters:
        name = parameter.name
        numel = round_up(max(parameter.numel, 1), ALIGNMENT_NUMEL)
        tile_numel = min(numel, _TILE_NUMEL)
        values = MASTER if parameter.states else PARAM
        kinds = {values: {values: (parameter.dtype, parameter.values)}}
        if parameter.states:
            kinds[OPTIMIZER] = {state: (torch.float32, read) for state, read in sorted(parameter.states.items())}
        tables, storages = [], []
        for storage, of_home in kinds.items():
            cells = tuple(CellPlan(name, kind, Tier.CPU, dtype, numel) for kind, (dtype, _) in of_home.items())
            plan = SegmentPlan(storage, Tier.CPU, cells, 0, numel, tile_numel)
            tables.append(HomeTable(storage, cells, ()))
            storages.append(Storage([_ReadSection(plan, parameter.numel, [read for _, read in of_home.values()])]))
        table = UnitTable(
            name=name,
            slots=(Slot(name, parameter.shape, parameter.numel, 0),),
            shard_start=0,
            shard_numel=numel,
            tile_numel=tile_numel,
            first_tile=0,
            storages=tuple(tables),
            offset=offset,
            checksums=((0,) * len(storages),) * -(-numel // tile_numel),
        )
        offset += table.nbytes
        yield UnitSource(table, tuple(storages), DONE, copied)
