"""A checkpoint that is being read: found, and everything but its tiles verified.

    checkpoints/step-200/   checkpoint.json   5e1c09aa-00000.tiles   5e1c09aa-00000.json   5e1c09aa.safetensors

A folder is a checkpoint if it has the marker, `checkpoint.json`, and every file that the marker names, in its size.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.boundedfiles import read_bytes
from penstock.checkpoint.boxes import Extent, why_not_whole
from penstock.checkpoint.manifest import (
    MARKER,
    MOST_MARKER_BYTES,
    MOST_SERIAL,
    FileEntry,
    Manifest,
    checksum,
    files_of,
)
from penstock.checkpoint.tables import RankTable, TileKey, UnitTable
from penstock.checkpoint.tensorfiles import read_tensors
from penstock.checkpoint.values import decode
from penstock.errors import CheckpointError, call_failed
from penstock.kinds import MASTER, OPTIMIZER, PARAM, is_average
from penstock.rules.rule import BLOCK_NUMEL
from penstock.typedfiles import Field

LATEST = "latest"
_MANY_PARTS = 64

logger = logging.getLogger("penstock")


# Found


def resolve(path: str | PathLike[str]) -> Path:
    """Find the checkpoint that a path stands for: itself, or the newest whole one in the folder or beside its `latest`.

    Raises:
        CheckpointError: there is none.
    """
    parent, found = stands_for(Path(path))
    return parent / found[0][0]


def stands_for(path: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Find everything that a path stands for.

    Returns:
        A folder, and names and tokens of checkpoints in it, the newest first: the path with an empty name, or all
        that are whole in it or beside its `latest`.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MARKER).is_file():
        return path, [("", read_marker(path).token)]
    parent = path.parent if path.name == LATEST and not path.is_dir() else path
    found = checkpoints_in(parent)
    if found:
        return parent, [(folder.name, manifest.token) for folder, manifest in reversed(found)]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.", file=str(path))
    raise CheckpointError(
        f"{path} is no whole checkpoint: it has no {MARKER}, which is written last. Load another one.",
        file=str(path / MARKER),
    )


def checkpoints_in(parent: Path) -> list[tuple[Path, Manifest]]:
    """Find the whole checkpoints in a folder, the newest last. Damaged ones are passed over, with a warning."""
    found = []
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            try:
                if (folder / MARKER).is_file():
                    found.append((folder, read_manifest(folder)))
            except CheckpointError as error:
                logger.warning("%s is passed over. %s", folder, error)
    return sorted(found, key=lambda pair: (pair[1].serial, pair[0].name))


def next_serial(folder: Path) -> int:
    """Count on: a number greater than that of every checkpoint here and beside it."""
    beside = checkpoints_in(folder.parent)
    serial = 1 + max((manifest.serial for _, manifest in beside), default=0)
    if serial > MOST_SERIAL:
        raise CheckpointError(
            f"{beside[-1][0]} says that it is the last that can be counted. Remove it, or save elsewhere.",
            file=str(beside[-1][0] / MARKER),
            field="serial",
        )
    return serial


# Its files


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's marker, and see that every file that it names is there, in its size.

    Raises:
        CheckpointError: names the file and the field.
    """
    manifest = read_marker(folder)
    for entry in files_of(manifest):
        file = folder / entry.name
        try:
            nbytes = file.stat().st_size if file.is_file() else -1
        except OSError as error:
            raise call_failed("Reading", file, error) from error
        if nbytes != entry.nbytes:
            why = f"has {nbytes:,} bytes, not {entry.nbytes:,}" if nbytes >= 0 else "is missing"
            raise CheckpointError(f"{file} {why}: the checkpoint is damaged. Load another one.", file=str(file))
    return manifest


def read_marker(folder: Path) -> Manifest:
    """Read a checkpoint's marker, whatever became of the files that it names.

    Raises:
        CheckpointError: names the file and the field.
    """
    marker = folder / MARKER
    return Manifest.read(marker, _read(marker, most=MOST_MARKER_BYTES))


def read_file(folder: Path, entry: FileEntry) -> bytes:
    """Read a file as a whole, and verify it.

    Raises:
        CheckpointError: it cannot be read, or is not what was written.
    """
    file = folder / entry.name
    data = _read(file, most=entry.nbytes)
    if len(data) != entry.nbytes or checksum(data) != entry.checksum:
        raise CheckpointError(
            f"{file} is damaged: its checksum is not the one in {MARKER}. Load another checkpoint.", file=str(file)
        )
    return data


def _read(file: Path, *, most: int) -> bytes:
    """Read a file that has at most so many bytes."""
    try:
        return read_bytes(file, most)
    except OSError as error:
        raise call_failed("Reading", file, error) from error


def _read_tensors(folder: Path, entry: FileEntry | None) -> Mapping[str, Tensor]:
    """Read a file of tensors as a whole; none where there is no such file."""
    return {} if entry is None else read_tensors(folder / entry.name, read_file(folder, entry))


# The whole


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker and tables were read.

    Attributes:
        folder: the checkpoint's own folder.
        manifest: what its marker says.
        tables: what each rank has written, by rank.
        tensors: the tensors of `extra`, options and buffers, by key.
    """

    folder: Path
    manifest: Manifest
    tables: Sequence[RankTable]
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Checkpoint":
        """Find the checkpoint that a path stands for, and read everything but the tiles.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return cls.read(resolve(path))

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read everything but the tiles of the checkpoint whose own folder this is.

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
        return cls(folder, manifest, tables, _read_tensors(folder, manifest.tensors))

    def own_tensors(self, rank: int) -> Mapping[str, Tensor]:
        """Read the buffers of a rank that are not the first one's, by key.

        Raises:
            CheckpointError: they are damaged.
        """
        return _read_tensors(self.folder, self.manifest.ranks[rank].tensors)

    def tiles(self) -> Iterator[TileKey]:
        """Go through every tile, in the order of the files."""
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            if files.data is not None:
                for unit in table.units:
                    for number in unit.tiles:
                        yield TileKey(self.folder / files.data.name, unit, number)

    @property
    def averages(self) -> set[str]:
        """The kinds of the averages of the parameters that it has."""
        homes = (home.name for table in self.tables for unit in table.units for home in unit.homes)
        return {name for name in homes if is_average(name)}

    def check_kinds(self, unit: UnitTable) -> None:
        """Refuse a unit whose homes have what cannot be, or lack what its parameters need.

        Raises:
            CheckpointError: names the unit.
        """
        wrong = _wrong_kinds(self.manifest, unit)
        if wrong is not None:
            raise CheckpointError(f"Unit '{unit.name}' of {self.folder} {wrong}.", field="homes")

    def check_whole(self) -> None:
        """Refuse a checkpoint in which an element of a parameter is not there, or is there twice.

        Raises:
            CheckpointError: names the file and the parameter.
        """
        found: dict[str, dict[Extent, list[tuple[int, int]]]] = {name: {} for name in self.manifest.parameters}
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            for slot in (slot for unit in table.units for slot in unit.slots if slot.name in found):
                extent = Extent.of(slot)
                shape = self.manifest.parameters[slot.name].shape
                if slot.region is not None and extent.shape != shape:
                    file = str(self.folder / files.table.name)
                    raise CheckpointError(
                        f"{file}: '{slot.name}' is a part of shape {extent.shape}, and {MARKER} says {shape}. Load "
                        "another checkpoint.",
                        file=file,
                        field="slots",
                    )
                found[slot.name].setdefault(extent, [])
        for key in self.tiles():
            for part in key.unit.parts(key.number):
                if part.slot.name in found:
                    found[part.slot.name][Extent.of(part.slot)].append((part.start, part.stop))
        for name, extents in found.items():
            self._check_parts(name, extents)

    def _check_parts(self, name: str, extents: Mapping[Extent, list[tuple[int, int]]]) -> None:
        """Refuse a parameter whose parts are not all of it, or have no tiles."""
        saved = self.manifest.parameters[name]
        whole = Extent(saved.shape, (0,) * len(saved.shape), saved.shape)
        if all(extent.sizes == extent.shape for extent in extents):  # wherever it is a whole
            ranges = [pair for of_extent in extents.values() for pair in of_extent]
            self.check_covered(name, ranges, 0, whole.numel)
            return
        if any(extent.shape != saved.shape for extent in extents):
            raise self.fail(f"parameters.{name}", f"has parts of another shape than {saved.shape}. Load another one.")
        if len(extents) > max(len(self.manifest.ranks), _MANY_PARTS):  # else a look at each pair could take for ever
            raise self.fail(f"parameters.{name}", "has more parts than any rank wrote. Load another one.")
        why = why_not_whole(saved.shape, list(extents))
        if why is not None:
            raise self.fail(f"parameters.{name}", f"{why}. Load another one.")
        for extent, ranges in extents.items():
            self.check_covered(name, ranges, 0, extent.numel)

    def check_covered(self, name: str, ranges: Iterable[tuple[int, int]], first: int, last: int) -> None:
        """Refuse a parameter whose elements `first` to `last` are not all there, or some of them twice.

        Of one that was left out none is there.

        Arguments:
            name: the parameter's.
            ranges: ranges of its elements, one for each tile that has some.
            first: the first element that is needed.
            last: one past the last.

        Raises:
            CheckpointError: names the parameter.
        """
        saved = self.manifest.parameters[name]
        if saved.left_out and saved.trained:
            raise self.fail(f"parameters.{name}", "was trained and left out, which no save does. Load another one.")
        cursor = first
        for start, stop in sorted(ranges):
            if start != cursor:
                break
            cursor = stop
        if cursor != (first if saved.left_out else last):
            raise self.fail(
                f"parameters.{name}", f"has no tile for its element {cursor:,}, or more than one. Load another one."
            )

    def value(self, name: str, value: object) -> Any:
        """Decode a part of the marker that is kept encoded; `name` is where it is in the marker."""
        return decode(Field(self.folder / MARKER, name, value), self.tensors)

    def fail(self, field: str, why: str) -> CheckpointError:
        """Make the error that names the marker and the field; the caller raises it."""
        file = str(self.folder / MARKER)
        return CheckpointError(f"{file}: '{field}' {why}", file=file, field=field)


def _wrong_kinds(manifest: Manifest, unit: UnitTable) -> str | None:
    """Say what a unit's homes have that cannot be, or lack; `None` where nothing is wrong."""
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
    for state in {state.name: state for slot in unit.slots for state in manifest.states_of(slot.name)}.values():
        # How many elements a value stands for is the shape's, which the rule that reads it knows.
        _, grain = kinds.get(OPTIMIZER, {}).get(state.name, (None, 1))
        needed[OPTIMIZER, state.name] = state.dtype, grain
        if state.scale_name is not None:
            needed[OPTIMIZER, state.scale_name] = torch.float32, BLOCK_NUMEL
    needed |= {(name, name): (torch.float32, 1) for name in kinds if is_average(name)}
    lacking = [kind for (home, kind), form in needed.items() if kinds.get(home, {}).get(kind) != form]
    return f"lacks '{lacking[0]}'" if lacking else None
