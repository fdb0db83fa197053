"""Reading checkpoints, and summaries of them."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.format import (
    MARKER,
    MOST_MARKER_BYTES,
    MOST_SERIAL,
    FileEntry,
    Manifest,
    checksum,
    decode,
    dtype_name,
    files_of,
    named,
)
from penstock.checkpoint.tables import BoxExtent, RankTable, TileKey, UnitTable, why_not_whole
from penstock.checkpoint.tensorfiles import read_tensors
from penstock.checkpoint.tiles import TileReader
from penstock.config import MASTER, OPTIMIZER, PARAM, is_average
from penstock.errors import CheckpointError
from penstock.files import Field, read_bytes
from penstock.layout import ALIGNMENT_NUMEL, round_up
from penstock.rules.rule import BLOCK_NUMEL

# ----------------------------------------------------------------------------------------------------------------------
# Finding a checkpoint, and verifying everything but its tiles.
#
#     checkpoints/step-200/   checkpoint.json   5e1c09aa-00000.tiles   5e1c09aa-00000.json   5e1c09aa.safetensors
#
# A folder is a checkpoint if it has the marker, `checkpoint.json`, and every file that the marker names, in its size.
# ----------------------------------------------------------------------------------------------------------------------


LATEST = "latest"
_MANY_PARTS = 64

logger = logging.getLogger("penstock")


# Found


def resolve(path: str | PathLike[str]) -> Path:
    """Return the checkpoint that a path stands for: itself, or the newest whole one in it or beside its `latest`.

    Raises:
        CheckpointError: there is none.
    """
    parent, found = stands_for(Path(path))
    return parent / found[0][0]


def stands_for(path: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Find the checkpoints that a path stands for.

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
    """List the whole checkpoints in a folder, the newest last. Damaged ones are passed over, with a warning."""
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
    """Return a number greater than that of every checkpoint in or beside a folder."""
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
    """Read a checkpoint's marker, and check that every file that it names exists in its size.

    Raises:
        CheckpointError: names the file and the field.
    """
    manifest = read_marker(folder)
    for entry in files_of(manifest):
        file = folder / entry.name
        with named("Reading", file):
            nbytes = file.stat().st_size if file.is_file() else -1
        if nbytes != entry.nbytes:
            why = f"has {nbytes:,} bytes, not {entry.nbytes:,}" if nbytes >= 0 else "is missing"
            raise CheckpointError(f"{file} {why}: the checkpoint is damaged. Load another one.", file=str(file))
    return manifest


def read_marker(folder: Path) -> Manifest:
    """Read a checkpoint's marker without a look at the files that it names.

    Raises:
        CheckpointError: names the file and the field.
    """
    marker = folder / MARKER
    with named("Reading", marker):
        return Manifest.read(marker, read_bytes(marker, MOST_MARKER_BYTES))


def read_file(folder: Path, entry: FileEntry) -> bytes:
    """Read a whole file, and verify its checksum.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    file = folder / entry.name
    with named("Reading", file):
        data = read_bytes(file, entry.nbytes)
    if len(data) != entry.nbytes or checksum(data) != entry.checksum:
        raise CheckpointError(
            f"{file} is damaged: its checksum is not the one in {MARKER}. Load another checkpoint.", file=str(file)
        )
    return data


def _read_tensors(folder: Path, entry: FileEntry | None) -> Mapping[str, Tensor]:
    """Read a file of tensors; without a file there are none."""
    return {} if entry is None else read_tensors(folder / entry.name, read_file(folder, entry))


# The whole


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose marker and tables have been read.

    Attributes:
        folder: the checkpoint's own folder.
        manifest: its marker.
        tables: the table of each rank, by rank.
        tensors: the tensors of `extra`, options and buffers, by key.
    """

    folder: Path
    manifest: Manifest
    tables: Sequence[RankTable]
    tensors: Mapping[str, Tensor]

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Checkpoint":
        """Read the checkpoint that a path stands for, except its tiles.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return cls.read(resolve(path))

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read the checkpoint in a folder, except its tiles.

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
        """Read the buffers of a rank that differ from the first one's, by key.

        Raises:
            CheckpointError: they are damaged.
        """
        return _read_tensors(self.folder, self.manifest.ranks[rank].tensors)

    def tiles(self) -> Iterator[TileKey]:
        """Yield every tile, in the order of the files."""
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            if files.data is not None:
                for unit in table.units:
                    for number in unit.tiles:
                        yield TileKey(self.folder / files.data.name, unit, number)

    @property
    def averages(self) -> set[str]:
        """The kinds of its averages of parameters."""
        storages = (storage.name for table in self.tables for unit in table.units for storage in unit.storages)
        return {name for name in storages if is_average(name)}

    def check_whole(self) -> None:
        """Refuse a checkpoint that does not hold every element of each parameter once, in valid kinds.

        Raises:
            CheckpointError: names the file and the parameter, or the unit.
        """
        found: dict[str, dict[BoxExtent, list[tuple[int, int]]]] = {name: {} for name in self.manifest.parameters}
        for files, table in zip(self.manifest.ranks, self.tables, strict=True):
            for unit in table.units:
                wrong = _wrong_kinds(self.manifest, unit)
                if wrong is not None:
                    raise CheckpointError(f"Unit '{unit.name}' of {self.folder} {wrong}.", field="homes")
                for slot in unit.slots:
                    shape = self.manifest.parameters[slot.name].shape
                    if BoxExtent.of(slot).shape != shape:
                        file = str(self.folder / files.table.name)
                        raise CheckpointError(
                            f"{file}: '{slot.name}' has shape {BoxExtent.of(slot).shape}, and {MARKER} says {shape}. "
                            "Load another checkpoint.",
                            file=file,
                            field="slots",
                        )
                    found[slot.name].setdefault(BoxExtent.of(slot), [])
                for part in unit.parts_between(*unit.held_range):
                    found[part.slot.name][BoxExtent.of(part.slot)].append((part.start, part.stop))
        for name, extents in found.items():
            self._check_parts(name, extents)

    def _check_parts(self, name: str, extents: Mapping[BoxExtent, Sequence[tuple[int, int]]]) -> None:
        """Refuse a parameter whose elements are not all in one tile each. One that was left out has none."""
        saved = self.manifest.parameters[name]
        if saved.left_out and saved.trained:
            raise self.fail(f"parameters.{name}", "was trained and left out, which no save does. Load another one.")
        extents = extents or {BoxExtent.whole(saved.shape): []}
        if len(extents) > max(len(self.manifest.ranks), _MANY_PARTS):  # the check of all pairs would take too long
            raise self.fail(f"parameters.{name}", "has more parts than any rank wrote. Load another one.")
        why = why_not_whole(saved.shape, list(extents))
        if why is not None:
            raise self.fail(f"parameters.{name}", f"{why}. Load another one.")
        for extent, ranges in extents.items():
            cursor = 0
            for start, stop in sorted(ranges):
                if start != cursor:
                    break
                cursor = stop
            if cursor != (0 if saved.left_out else extent.numel):
                raise self.fail(
                    f"parameters.{name}", f"has no tile for its element {cursor:,}, or more than one. Load another one."
                )

    def value(self, name: str, value: object) -> Any:
        """Decode an encoded part of the marker. `name` is its path there, for errors."""
        return decode(Field(self.folder / MARKER, name, value), self.tensors)

    def fail(self, field: str, why: str) -> CheckpointError:
        """Return an error that names the marker and the field."""
        file = str(self.folder / MARKER)
        return CheckpointError(f"{file}: '{field}' {why}", file=file, field=field)


def _wrong_kinds(manifest: Manifest, unit: UnitTable) -> str | None:
    """Return what is wrong with the kinds of a unit; `None` if they are valid."""
    strangers = [slot.name for slot in unit.slots if slot.name not in manifest.parameters]
    if strangers:
        return f"has '{strangers[0]}', which is no parameter"
    saved = [manifest.parameters[slot.name] for slot in unit.slots]
    kinds = {storage.name: {cell.kind: (cell.dtype, cell.grain) for cell in storage.cells} for storage in unit.storages}
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
    needed = {
        (storage, storage): (dtype, 1) for storage, dtype in ((PARAM, param), (MASTER, master)) if dtype is not None
    }
    for state in {state.name: state for slot in unit.slots for state in manifest.states_of(slot.name)}.values():
        # The grain follows from the shape of the state, which only the rule that loads it knows.
        _, grain = kinds.get(OPTIMIZER, {}).get(state.name, (None, 1))
        needed[OPTIMIZER, state.name] = state.dtype, grain
        if state.scale_name is not None:
            needed[OPTIMIZER, state.scale_name] = torch.float32, BLOCK_NUMEL
    needed |= {(name, name): (torch.float32, 1) for name in kinds if is_average(name)}
    lacking = [kind for (storage, kind), form in needed.items() if kinds.get(storage, {}).get(kind) != form]
    return f"lacks '{lacking[0]}'" if lacking else None


# ----------------------------------------------------------------------------------------------------------------------
# Summaries of checkpoints, and verification.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_CHARS = 120


def summarize(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a summary of a checkpoint as JSON-like values, from its marker and tables.

    Returns:
        `path`, `created`, `versions`, `world_size`, `model`; `steps`: the least and the greatest count of a trained
        parameter; `parameters`: their count and elements, how many elements were left out, and how many parameters
        are divided, saved in parts; `optimizer`: rule, states, param groups; `kinds`: bytes of each; `tiers`: bytes of
        each storage on the tier that it was saved from, over all ranks; `buffers`, `loss_scale`, `extra`,
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
                {"parameters": len(group.parameters), "options": _short(of_group)}
                for group, of_group in zip(manifest.groups, options, strict=True)
            ],
        },
        "kinds": _kinds(checkpoint),
        "tiers": _tiers(checkpoint),
        "buffers": len(manifest.buffers),
        "loss_scale": None if manifest.loss_scale is None else dict(manifest.loss_scale),
        "extra": _short(checkpoint.value("extra", manifest.extra)),
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
    }


def damaged_tiles(checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Verify every tile, and the buffers of single ranks. Yield the error of each that is damaged."""
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
    """Return the names of parameters that ranks have saved parts of."""
    slots = (slot for table in checkpoint.tables for unit in table.units for slot in unit.slots)
    return {slot.name for slot in slots if slot.region is not None}


def _kinds(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Add up bytes by kind and dtype, with padding of parameters, without that of shards and pages, and without copies.

    Each tensor-parallel rank writes the parameters that all of them have whole. Only the first one's table names them.
    """
    nbytes: Counter[tuple[str, str]] = Counter()
    for unit in (unit for table in checkpoint.tables for unit in table.units if unit.checksums):
        first, last = unit.held_range
        ends = (
            (max(slot.start, first), min(slot.start + round_up(slot.numel, ALIGNMENT_NUMEL), last))
            for slot in unit.slots
        )
        named = sum(max(0, stop - start) for start, stop in ends)
        for cell in (cell for storage in unit.storages for cell in storage.cells):
            nbytes[cell.kind, dtype_name(cell.dtype)] += cell.part(0, named).stop * cell.dtype.itemsize
    return [{"kind": kind, "dtype": dtype, "bytes": count} for (kind, dtype), count in nbytes.items()]


def _tiers(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Add up the bytes of each storage by the tier that it was saved from."""
    nbytes: Counter[tuple[str, str]] = Counter()
    for storage in (storage for table in checkpoint.tables for unit in table.units for storage in unit.storages):
        for tier, count in storage.tiers:
            nbytes[storage.name, tier] += count
    return [{"home": storage, "tier": tier, "bytes": count} for (storage, tier), count in nbytes.items()]


def _short(value: Any) -> Any:
    """Truncate a value for display: a tensor to its shape, a long text to its beginning."""
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
