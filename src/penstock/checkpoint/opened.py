"""A checkpoint that is being read: everything but the tiles, verified."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.fields import Field
from penstock.checkpoint.folder import read_file, read_manifest, resolve
from penstock.checkpoint.manifest import MARKER, Manifest, read_tensors
from penstock.checkpoint.reading import TileKey
from penstock.checkpoint.tables import RankTable, UnitTable
from penstock.checkpoint.values import decode
from penstock.errors import CheckpointError
from penstock.kinds import MASTER, OPTIMIZER, PARAM
from penstock.rules.rule import BLOCK_NUMEL


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker and tables were read."""

    folder: Path
    manifest: Manifest
    tables: Sequence[RankTable]
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Checkpoint":
        """Read everything but the tiles.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return cls.read(resolve(path))

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """The same of the checkpoint's own folder.

        Raises:
            CheckpointError: it is damaged.
        """
        manifest = read_manifest(folder)
        sizes = [files.data.nbytes if files.data is not None else 0 for files in manifest.ranks]
        tables = [
            RankTable.read(
                folder / files.table.name,
                read_file(folder, files.table),
                file_bytes=nbytes,
                all_bytes=sum(sizes),
            )
            for files, nbytes in zip(manifest.ranks, sizes, strict=True)
        ]
        entry = manifest.tensors
        tensors = read_tensors(folder / entry.name, read_file(folder, entry)) if entry is not None else {}
        return cls(folder, manifest, tables, tensors)

    def own_tensors(self, rank: int) -> Mapping[str, Tensor]:
        """The buffers of a rank that are not the first one's, by key.

        Raises:
            CheckpointError: they are damaged.
        """
        entry = self.manifest.ranks[rank].tensors
        return read_tensors(self.folder / entry.name, read_file(self.folder, entry)) if entry is not None else {}

    def tiles(self) -> Iterator[TileKey]:
        """Every tile, in the order of the files."""
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            if files.data is not None:
                for unit in table.units:
                    for number in unit.tiles:
                        yield TileKey(self.folder / files.data.name, unit, number)

    def check_kinds(self, unit: UnitTable) -> None:
        """Refuse a unit whose homes have what cannot be, or lack what its parameters need.

        Raises:
            CheckpointError: names the unit.
        """
        wrong = _wrong_kinds(self.manifest, unit)
        if wrong is not None:
            raise CheckpointError(f"Unit '{unit.name}' of {self.folder} {wrong}.", field="homes")

    def check_covered(self, name: str, ranges: Iterable[tuple[int, int]], first: int, last: int) -> None:
        """Refuse a parameter whose elements `first` to `last` are not all there, or some of them twice.

        Arguments:
            name: the parameter's.
            ranges: of its elements, one for each tile that has some.
            first: the first element that is needed.
            last: one past the last.

        Raises:
            CheckpointError: names the parameter.
        """
        cursor = first
        for start, stop in sorted(ranges):
            if start != cursor:
                break
            cursor = stop
        if cursor != last:
            raise self.fail(
                f"parameters.{name}", f"has no tile for its element {cursor:,}, or more than one. Load another one."
            )

    def value(self, name: str, value: object) -> Any:
        """A part of the marker that is kept encoded."""
        return decode(Field(self.folder / MARKER, name, value), self.tensors)

    def fail(self, field: str, why: str) -> CheckpointError:
        """The error that names the marker and the field."""
        file = str(self.folder / MARKER)
        return CheckpointError(f"{file}: '{field}' {why}", file=file, field=field)


def _wrong_kinds(manifest: Manifest, unit: UnitTable) -> str | None:
    """What a unit's homes have that cannot be, or lack."""
    strangers = [slot.name for slot in unit.slots if slot.name not in manifest.parameters]
    if strangers:
        return f"has '{strangers[0]}', which is no parameter"
    saved = [manifest.parameters[slot.name] for slot in unit.slots]
    kinds = {home.name: {cell.kind: (cell.dtype, cell.grain) for cell in home.cells} for home in unit.homes}
    param, _ = kinds.get(PARAM, {}).get(PARAM, (None, 1))
    master, _ = kinds.get(MASTER, {}).get(MASTER, (None, 1))
    if master not in (None, torch.int16, torch.float32):
        return "has a strange master"
    if param is None and master != torch.float32:
        return "has no parameters"
    if master == torch.int16 and param != torch.bfloat16:
        return "has half a master"
    if any(param not in (None, p.dtype) or (master is not None and not p.dtype.is_floating_point) for p in saved):
        return "has parameters of another dtype"
    needed = {(home, home): (dtype, 1) for home, dtype in ((PARAM, param), (MASTER, master)) if dtype is not None}
    for state in manifest.states if any(p.trained for p in saved) else ():
        needed[OPTIMIZER, state.name] = state.dtype, 1
        if state.scale_name is not None:
            needed[OPTIMIZER, state.scale_name] = torch.float32, BLOCK_NUMEL
    lacking = [kind for (home, kind), form in needed.items() if kinds.get(home, {}).get(kind) != form]
    return f"lacks '{lacking[0]}'" if lacking else None
