"""A checkpoint that is being read: everything but the tiles, verified."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.fields import Field
from penstock.checkpoint.folder import read_file, read_manifest, resolve
from penstock.checkpoint.manifest import MARKER, Manifest, read_tensors
from penstock.checkpoint.reading import TileKey
from penstock.checkpoint.tables import RankTable
from penstock.checkpoint.values import decode
from penstock.errors import CheckpointError


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
        folder = resolve(path)
        manifest = read_manifest(folder)
        tables = [
            RankTable.read(
                folder / files.table.name,
                read_file(folder, files.table),
                file_bytes=files.data.nbytes if files.data is not None else 0,
            )
            for files in manifest.ranks
        ]
        entry = manifest.tensors
        tensors = read_tensors(folder / entry.name, read_file(folder, entry)) if entry is not None else {}
        return cls(folder, manifest, tables, tensors)

    def tiles(self) -> Iterator[TileKey]:
        """Every tile, in the order of the files."""
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            if files.data is not None:
                for unit in table.units:
                    for number in unit.tiles:
                        yield TileKey(self.folder / files.data.name, unit, number)

    def value(self, name: str, value: object) -> Any:
        """A part of the marker that is kept encoded."""
        return decode(Field(self.folder / MARKER, name, value), self.tensors)

    def fail(self, field: str, why: str) -> CheckpointError:
        """The error that names the marker and the field."""
        file = str(self.folder / MARKER)
        return CheckpointError(f"{file}: '{field}' {why}", file=file, field=field)
