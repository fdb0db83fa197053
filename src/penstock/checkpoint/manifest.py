"""`checkpoint.json`: what a checkpoint is. A folder without it is none; it appears whole, after everything it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.fields import Field, dtype_name, memory_bytes, parse, to_bytes
from penstock.errors import CheckpointError, one_line
from penstock.machine import aio
from penstock.rules.rule import StateSpec

MARKER = "checkpoint.json"
FORMAT = "penstock"
VERSION = 1

#: Far beyond every count of saves: what a save counts up from is never near the end of numbers.
MOST_SERIAL = 1 << 48
#: What people hand over as `extra` is there as a whole, so this bounds markers that nobody has written.
MOST_MARKER_BYTES = 1 << 30
_MOST_VALUE_BYTES = 1 << 32


def checksum(data: bytes) -> int:
    """CRC-32C."""
    if not data:
        return 0
    return aio.checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def checksum_of(tensor: Tensor) -> int:
    """CRC-32C of the bytes of a contiguous tensor on the cpu."""
    return aio.checksum(tensor) if tensor.numel() else 0


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint, beside the marker."""

    name: str
    nbytes: int
    checksum: int  # of files that are read as a whole; tiles have their own

    def to_json(self) -> list[object]:
        """For `read`."""
        return [self.name, self.nbytes, self.checksum]

    @classmethod
    def read(cls, field: Field) -> "FileEntry":
        """Check and take one."""
        name, nbytes, crc = field.items(3)
        if Path(name.string()).name != name.string() or name.string() in ("", ".", ".."):
            raise name.fail(f"is {name.value!r}, not the name of a file beside it")
        return cls(name.string(), nbytes.integer(), crc.integer(most=0xFFFFFFFF))


@dataclass(frozen=True)
class RankFiles:
    """What one rank wrote: tiles, the table of them, and those of its buffers that are not the first rank's."""

    data: FileEntry | None
    table: FileEntry
    tensors: FileEntry | None = None

    def to_json(self) -> dict[str, object]:
        """For `read`."""
        content: dict[str, object] = {
            "data": self.data.to_json() if self.data else None,
            "table": self.table.to_json(),
        }
        return content | ({"tensors": self.tensors.to_json()} if self.tensors else {})

    @classmethod
    def read(cls, field: Field) -> "RankFiles":
        """Check and take one."""
        tensors = FileEntry.read(field["tensors"]) if "tensors" in dict(field.entries()) else None
        return cls(field["data"].optional(FileEntry.read), FileEntry.read(field["table"]), tensors)


@dataclass(frozen=True)
class SavedParameter:
    """What is known of a parameter beside its elements.

    Attributes:
        shape: whole.
        dtype: while computing.
        trained: there are states of the rule, and the master's other part.
        step: how often it was updated.
        scalars: its own scalars, where the rule has some.
        has_state: the optimizer has state of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    step: int
    scalars: Mapping[str, float]
    has_state: bool

    def to_json(self) -> dict[str, object]:
        """For `read`."""
        return {
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "trained": self.trained,
            "step": self.step,
            "scalars": dict(self.scalars),
            "has_state": self.has_state,
        }

    @classmethod
    def read(cls, field: Field) -> "SavedParameter":
        """Check and take one."""
        return cls(
            shape=field["shape"].shape(),
            dtype=field["dtype"].dtype(),
            trained=field["trained"].boolean(),
            step=field["step"].integer(),
            scalars={name: item.number() for name, item in field["scalars"].entries()},
            has_state=field["has_state"].boolean(),
        )


@dataclass(frozen=True)
class SavedGroup:
    """A param group: its parameters' names, and its options as `checkpoint.values` encodes them."""

    parameters: tuple[str, ...]
    options: object


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's marker.

    Attributes:
        serial: greater than that of every checkpoint that was beside it.
        token: what the names of its files begin with.
        created: when, in ISO 8601.
        versions: of penstock and torch.
        ranks: by rank.
        tensors: those of `extra`, buffers and options; `None` where there are none.
        rule, states: of the optimizer.
        parameters: by name.
        buffers: keys of the model's persistent buffers among the tensors, by name.
        loss_scale: as `engine.scale.LossScale` keeps it.
        model: its class, and its configuration where it has one.
        extra: as `checkpoint.values` encodes it.
    """

    serial: int
    token: str
    created: str
    versions: Mapping[str, str]
    ranks: tuple[RankFiles, ...]
    tensors: FileEntry | None
    rule: str
    states: tuple[StateSpec, ...]
    parameters: Mapping[str, SavedParameter]
    groups: tuple[SavedGroup, ...]
    buffers: Mapping[str, str]
    loss_scale: Mapping[str, float] | None
    model: Mapping[str, str]
    extra: object

    def to_bytes(self) -> bytes:
        """The file: the content, and its checksum.

        Raises:
            CheckpointError: it would be larger than what is read again.
        """
        content = {
            "serial": self.serial,
            "token": self.token,
            "created": self.created,
            "versions": dict(self.versions),
            "ranks": [files.to_json() for files in self.ranks],
            "tensors": self.tensors.to_json() if self.tensors else None,
            "rule": self.rule,
            "states": [[state.name, dtype_name(state.dtype), state.signed] for state in self.states],
            "parameters": {name: parameter.to_json() for name, parameter in self.parameters.items()},
            "groups": [{"parameters": list(group.parameters), "options": group.options} for group in self.groups],
            "buffers": dict(self.buffers),
            "loss_scale": dict(self.loss_scale) if self.loss_scale is not None else None,
            "model": dict(self.model),
            "extra": self.extra,
        }
        crc = checksum(to_bytes(content))
        text = to_bytes({"format": FORMAT, "version": VERSION, "content": content, "checksum": crc}) + b"\n"
        if len(text) > MOST_MARKER_BYTES or memory_bytes(text) > _MOST_VALUE_BYTES:
            raise CheckpointError(
                f"extra makes a {MARKER} of {len(text):,} bytes, more than is read. Save large values as tensors.",
                field="extra",
            )
        return text

    @classmethod
    def read(cls, file: Path, text: bytes) -> "Manifest":
        """Check and take a marker's bytes.

        Arguments:
            file: for messages.
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
        return cls._read(Field(file, "", whole["content"].value))

    @classmethod
    def _read(cls, field: Field) -> "Manifest":
        manifest = cls(
            serial=field["serial"].integer(most=MOST_SERIAL),
            token=field["token"].string(),
            created=field["created"].string(),
            versions={name: item.string() for name, item in field["versions"].entries()},
            ranks=tuple(RankFiles.read(item) for item in field["ranks"].items()),
            tensors=field["tensors"].optional(FileEntry.read),
            rule=field["rule"].string(),
            states=tuple(_read_state(item) for item in field["states"].items()),
            parameters={name: SavedParameter.read(item) for name, item in field["parameters"].entries()},
            groups=tuple(
                SavedGroup(item["parameters"].strings(), item["options"].value) for item in field["groups"].items()
            ),
            buffers={name: item.string() for name, item in field["buffers"].entries()},
            loss_scale=field["loss_scale"].optional(_read_numbers),
            model={name: item.string() for name, item in field["model"].entries()},
            extra=field["extra"].value,
        )
        names = [entry.name for entry in files_of(manifest)]
        if len(set(names)) < len(names):  # each would be read once for every time that it is named
            raise field["ranks"].fail("names a file twice")
        return manifest


def _again(content: Field) -> bytes:
    try:
        return to_bytes(content.value)
    except (ValueError, RecursionError, TypeError, MemoryError) as error:
        raise content.fail(f"cannot be read ({one_line(error)})") from error


def _read_state(field: Field) -> StateSpec:
    name, dtype, signed = field.items(3)
    if dtype.dtype() not in (torch.float32, torch.bfloat16, torch.uint8):
        raise dtype.fail(f"is {dtype.value!r}, in which no state is stored")
    return StateSpec(name.string(), dtype.dtype(), signed.boolean())


def _read_numbers(field: Field) -> Mapping[str, float]:
    return {name: item.number() for name, item in field.entries()}


def read_tensors(file: Path | str, text: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file's bytes.

    Raises:
        CheckpointError: it is none.
    """
    import safetensors.torch

    try:
        return dict(safetensors.torch.load(text))
    except Exception as error:  # whatever the file makes of the library
        raise CheckpointError(f"{file} is damaged: {one_line(error)}.", file=str(file)) from error


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file of them."""
    import safetensors.torch

    return bytes(safetensors.torch.save(dict(tensors)))


def files_of(manifest: Manifest) -> Sequence[FileEntry]:
    """Every file that the marker names."""
    entries = [entry for files in manifest.ranks for entry in (files.data, files.table, files.tensors)]
    return [entry for entry in (*entries, manifest.tensors) if entry is not None]
