"""`checkpoint.json`: what a checkpoint is. A folder without it is none; it appears whole, after everything it names."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.fields import (
    MOST_CHECKSUM,
    Dtype,
    Shape,
    dtype_name,
    memory_bytes,
    parse,
    read_dtype,
    to_bytes,
)
from penstock.errors import CheckpointError, one_line
from penstock.machine import aio
from penstock.rules.rule import StateSpec
from penstock.typedfiles import Field, members, reader

MARKER = "checkpoint.json"
FORMAT = "penstock"
VERSION = 1

#: Looked up now: it takes descriptors, of which a process may have none later.
VERSIONS = {name: version(name) for name in ("penstock", "torch")}

#: Far beyond every count of saves: what a save counts up from is never near the end of numbers.
MOST_SERIAL = 1 << 48
#: What people hand over as `extra` is there as a whole, so this bounds markers that nobody has written.
MOST_MARKER_BYTES = 1 << 30
_MOST_VALUE_BYTES = 1 << 32


def checksum(data: bytes) -> int:
    """Compute the CRC-32C of some bytes."""
    if not data:
        return 0
    return checksum_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def checksum_of(tensor: Tensor) -> int:
    """Compute the CRC-32C of the bytes of a contiguous tensor on the cpu."""
    return aio.checksum(tensor) if tensor.numel() else 0


def _read_file_name(field: Field) -> str:
    """Read the name of a file in the checkpoint's own folder: what a marker names is never elsewhere."""
    name = field.string()
    if Path(name).name != name or name in ("", ".", ".."):
        raise field.fail(f"is {name!r}, not the name of a file beside it")
    return name


class FileEntry(NamedTuple):
    """A file of the checkpoint, beside the marker."""

    name: Annotated[str, _read_file_name]
    nbytes: int
    checksum: Annotated[
        int, partial(Field.integer, most=MOST_CHECKSUM)
    ]  # of files read as a whole; tiles have their own


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote: tiles, the table of them, and those of its buffers that are not the first rank's."""

    data: FileEntry | None
    table: FileEntry
    tensors: FileEntry | None = None


@dataclass(frozen=True)
class SavedParameter:
    """What is known of a parameter beside its elements.

    Attributes:
        shape: the shape of the whole parameter.
        dtype: the dtype that it has while the model computes.
        trained: whether there are states of the rule, and the master's other part.
        step: how often it was updated.
        scalars: its own scalars, where the rule has some.
        has_state: whether the optimizer has state of it.
        left_out: whether its values are not in the checkpoint: it was frozen, and comes from where it first came from.
        states: names of its states; `None` where every trained parameter has all of those of the rule.
    """

    shape: Shape
    dtype: Dtype
    trained: bool
    step: int
    scalars: Mapping[str, float]
    has_state: bool
    left_out: bool | None = None  # `True` or nothing: most checkpoints are whole
    states: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SavedGroup:
    """A param group: its parameters' names, and its options as `checkpoint.values` encodes them."""

    parameters: tuple[str, ...]
    options: object


def _read_state(field: Field) -> StateSpec:
    """Read a state of the rule, `[name, dtype, signed]`."""
    name, dtype, signed = field.items(3)
    if read_dtype(dtype) not in (torch.float32, torch.bfloat16, torch.uint8):
        raise dtype.fail(f"is {dtype.value!r}, in which no state is stored")
    return StateSpec(name.string(), read_dtype(dtype), signed.boolean())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's marker: one attribute for each thing that the file says, so they are more than elsewhere.

    Attributes:
        serial: a number that is greater than that of every checkpoint that was beside it.
        token: what the names of its files begin with.
        created: when it was made, in ISO 8601.
        versions: the versions of penstock and torch that made it.
        ranks: the files of each rank, by rank.
        tensors: the file of the tensors of `extra`, buffers and options; `None` where there are none.
        rule: the name of the optimizer's rule.
        states: the states that the rule keeps of each element.
        parameters: what is known of each parameter, by name.
        groups: the param groups.
        buffers: keys of the model's persistent buffers among the tensors, by name.
        loss_scale: the loss scale of fp16 as `engine.scale.LossScale` keeps it.
        model: the model's class, and its configuration where it has one.
        extra: what the user adds, as `checkpoint.values` encodes it.
    """

    serial: Annotated[int, partial(Field.integer, most=MOST_SERIAL)]
    token: str
    created: str
    versions: Mapping[str, str]
    ranks: tuple[RankFiles, ...]
    tensors: FileEntry | None
    rule: str
    states: Annotated[tuple[StateSpec, ...], lambda field: tuple(map(_read_state, field.items()))]
    parameters: Mapping[str, SavedParameter]
    groups: tuple[SavedGroup, ...]
    buffers: Mapping[str, str]
    loss_scale: Mapping[str, float] | None
    model: Mapping[str, str]
    extra: object

    @classmethod
    def new(cls, **content: Any) -> "Manifest":
        """Make the marker of a checkpoint of now: of all but its token, time and versions."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(token=secrets.token_hex(4), created=created, versions=VERSIONS.copy(), **content)

    def to_bytes(self) -> bytes:
        """Write the file: the content, and its checksum.

        Raises:
            CheckpointError: it would be larger than what is read again.
        """
        states = [[state.name, dtype_name(state.dtype), state.signed] for state in self.states]
        content = members(self) | {"states": states}
        crc = checksum(to_bytes(content))
        text = to_bytes({"format": FORMAT, "version": VERSION, "content": content, "checksum": crc}) + b"\n"
        if len(text) > MOST_MARKER_BYTES or memory_bytes(text) > _MOST_VALUE_BYTES:
            raise CheckpointError(
                f"extra makes a {MARKER} of {len(text):,} bytes, more than is read. Save large values as tensors.",
                field="extra",
            )
        return text

    def states_of(self, name: str) -> list[StateSpec]:
        """List the states of a parameter, in the order of all of them."""
        saved = self.parameters[name]
        if not saved.trained:
            return []
        return [state for state in self.states if saved.states is None or state.name in saved.states]

    @classmethod
    def read(cls, file: Path, text: bytes) -> "Manifest":
        """Check and take a marker's bytes.

        Arguments:
            file: the marker, for messages.
            text: its bytes.

        Raises:
            CheckpointError: names the field that cannot be.
        """
        whole = parse(file, text, most_bytes=_MOST_VALUE_BYTES)
        if whole["format"].string() != FORMAT:
            raise whole["format"].fail(f"is {whole['format'].value!r}: this is no checkpoint of Penstock")
        if whole["version"].integer() != VERSION:
            raise whole["version"].fail(f"is {whole['version'].value}; this version of Penstock reads {VERSION}")
        if whole["checksum"].integer() != checksum(_again(whole["content"])):
            raise whole["checksum"].fail("is not that of the content: the file is damaged. Load another checkpoint")
        content = Field(file, "", whole["content"].value)
        manifest = _read_manifest(content)
        names = [entry.name for entry in files_of(manifest)]
        if len(set(names)) < len(names):  # each would be read once for every time that it is named
            raise content["ranks"].fail("names a file twice")
        return manifest


_read_manifest: Callable[[Field], Manifest] = reader(Manifest)


def _again(content: Field) -> bytes:
    """Write what was read, as it was written: the checksum is that of these bytes."""
    try:
        return to_bytes(content.value)
    except (ValueError, RecursionError, TypeError, MemoryError) as error:
        raise content.fail(f"cannot be read ({one_line(error)})") from error


def files_of(manifest: Manifest) -> Sequence[FileEntry]:
    """List every file that the marker names."""
    entries = [entry for files in manifest.ranks for entry in (files.data, files.table, files.tensors)]
    return [entry for entry in (*entries, manifest.tensors) if entry is not None]
