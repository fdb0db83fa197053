"""The format of a checkpoint's JSON: fields, the manifest and values."""

import contextlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.tensorfiles import DTYPES
from penstock.errors import CheckpointError, ConfigError, PenstockError, call_failed, one_line
from penstock.files import Field, members, reader
from penstock.rules.rule import StateSpec
from penstock.runtime import aio

# ----------------------------------------------------------------------------------------------------------------------
# JSON of checkpoints, parsed within bounds of memory; dtypes and shapes of tensors in it; and how it is written.
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def named(verb: str, path: Path) -> Iterator[None]:
    """Name a file or folder in errors of the system that have no name yet.

    Raises:
        CheckpointError: in their place.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        raise call_failed(verb, path, error) from error


#: Of a tensor: more than any has, few enough that nothing about a shape takes long.
MOST_DIMENSIONS = 64
MOST_NUMEL = 1 << 50
MOST_CHECKSUM = 0xFFFFFFFF


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}


def read_dtype(field: Field) -> torch.dtype:
    """Read the name of a dtype."""
    found = _DTYPES.get(field.string())
    if found is None:
        raise field.refuse("the name of a dtype")
    return found


def read_shape(field: Field) -> tuple[int, ...]:
    """Read the shape of a tensor."""
    sizes = field.integers()
    if len(sizes) > MOST_DIMENSIONS or math.prod(size or 1 for size in sizes) > MOST_NUMEL:
        raise field.fail(f"is larger than any tensor: {sizes[:MOST_DIMENSIONS]}")
    return sizes


#: In declarations of what files hold.
Dtype = Annotated[torch.dtype, read_dtype]
Shape = Annotated[tuple[int, ...], read_shape]


def parse(file: Path, text: bytes, *, most_bytes: int) -> Field:
    """Read a JSON file's bytes.

    Arguments:
        file: the file, for messages.
        text: its bytes.
        most_bytes: how much memory its values may take; a byte of JSON can become eighty.

    Raises:
        CheckpointError: they are not JSON, or take more.
    """
    needed = memory_bytes(text)
    if needed > most_bytes:
        raise CheckpointError(
            f"{file} is damaged: its values would take {needed:,} bytes of memory, more than what such a file says.",
            file=str(file),
        )
    try:
        return Field(file, "", json.loads(text))
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({one_line(error)}).", file=str(file)) from error


def memory_bytes(text: bytes) -> int:
    """Return an upper estimate of the memory that the values of a JSON text take, without parsing it."""
    return (
        2 * len(text)
        + 64 * text.count(b"[")
        + 232 * text.count(b"{")  # with a first key
        + 104 * text.count(b":")
        + 40 * text.count(b",")  # a number, and its place
        + 25 * text.count(b'"')
    )


def to_bytes(value: object) -> bytes:
    """Write JSON with keys in their order. Values that `reader` has read give the same bytes again."""
    return json.dumps(value, separators=(",", ":"), default=_as_json).encode()


def _as_json(value: Any) -> object:
    """Convert a dtype or a dataclass to JSON values. A dataclass may have a `to_json` of its own."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    own = getattr(value, "to_json", None)
    return own() if own is not None else members(value)


# ----------------------------------------------------------------------------------------------------------------------
# `checkpoint.json`, the marker. A folder without it is no checkpoint. It is written last, as a whole.
# ----------------------------------------------------------------------------------------------------------------------


MARKER = "checkpoint.json"
FORMAT = "penstock"
VERSION = 1

#: Looked up at import: it needs descriptors, of which a process may have none later.
VERSIONS = {name: version(name) for name in ("penstock", "torch")}

#: Far beyond any count of saves.
MOST_SERIAL = 1 << 48
#: `extra` is in the marker, so this is generous. It bounds markers that no save has written.
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
    """Read the name of a file, which lies in the checkpoint's own folder."""
    name = field.string()
    if Path(name).name != name or name in ("", ".", ".."):
        raise field.fail(f"is {name!r}, not the name of a file beside it")
    return name


class FileEntry(NamedTuple):
    """A file of the checkpoint, beside the marker."""

    name: Annotated[str, _read_file_name]
    nbytes: int
    # Of files read as a whole; tiles have their own.
    checksum: Annotated[int, partial(Field.integer, most=MOST_CHECKSUM)]


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank: tiles, their table, and its buffers that differ from the first rank's."""

    data: FileEntry | None
    table: FileEntry
    tensors: FileEntry | None = None


@dataclass(frozen=True)
class SavedParameter:
    """A parameter in the marker.

    Attributes:
        shape: the shape of the whole parameter.
        dtype: the dtype that it has while the model computes.
        trained: True if it has master weights and optimizer states.
        step: the count of its updates.
        scalars: its own scalars, if the rule has some.
        has_state: True if the optimizer has state for it.
        left_out: True if it was frozen and its values are not in the checkpoint.
        states: the names of its states; `None` if it has all states of the rule.
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
    """A param group: the names of its parameters, and its options as `encode` writes them."""

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
    """A checkpoint's marker, with an attribute for each field of the file.

    Attributes:
        serial: a number that is greater than that of every checkpoint that was beside it.
        token: what the names of its files begin with.
        created: when it was made, in ISO 8601.
        versions: the versions of penstock and torch that made it.
        ranks: the files of each rank, by rank.
        tensors: the file of the tensors of `extra`, buffers and options; `None` where there are none.
        rule: the name of the optimizer's rule.
        states: the states that the rule keeps of each element.
        parameters: each parameter, by name.
        groups: the param groups.
        buffers: keys of the model's persistent buffers among the tensors, by name.
        loss_scale: the state of the fp16 loss scale.
        model: the model's class, and its configuration files if it has some.
        extra: the values that the user adds, as `encode` writes them.
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
        """Make a new marker: add token, time and versions to its content."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(token=secrets.token_hex(4), created=created, versions=VERSIONS.copy(), **content)

    def to_bytes(self) -> bytes:
        """Write the file: the content, and its checksum.

        Raises:
            CheckpointError: it would be too large to be read again.
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
        """Read and check a marker's bytes.

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
        if len(set(names)) < len(names):  # a file would be read once for every time that it is named
            raise content["ranks"].fail("names a file twice")
        return manifest


_read_manifest: Callable[[Field], Manifest] = reader(Manifest)


def _again(content: Field) -> bytes:
    """Write parsed content again: the marker's checksum is that of these bytes."""
    try:
        return to_bytes(content.value)
    except (ValueError, RecursionError, TypeError, MemoryError) as error:
        raise content.fail(f"cannot be read ({one_line(error)})") from error


def files_of(manifest: Manifest) -> Sequence[FileEntry]:
    """List every file that the marker names."""
    entries = [entry for files in manifest.ranks for entry in (files.data, files.table, files.tensors)]
    return [entry for entry in (*entries, manifest.tensors) if entry is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Values of users: JSON-like values and tensors, never code.
#
# Values become JSON. A type that JSON lacks is an object with the key `!`, which names the type. Tensors are stored by
# key in a safetensors file.
#
#     tuple                       {"!": "tuple", "items": [...]}
#     dict with other keys        {"!": "dict", "items": [[key, value], ...]}
#     bytes                       {"!": "bytes", "hex": "..."}
#     tensor                      {"!": "tensor", "key": "extra.3"}
# ----------------------------------------------------------------------------------------------------------------------


TAG = "!"
_MOST_ALIKE = 64
_MOST_BITS = 8192  # accepted by every reader of JSON


def encode(value: object, tensors: dict[str, Tensor], *, what: str) -> object:
    """Convert a value to JSON values.

    Arguments:
        value: numbers, strings, booleans, `None`, bytes, tensors, and lists, tuples and dicts of them.
        tensors: receives the tensors that are found, copied to the cpu.
        what: the value's name in errors, and in the keys of tensors.

    Raises:
        ConfigError: the value contains another type. The message names it.
    """
    try:
        return _encode(value, what, [], partial(_keep, tensors, what))
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply. Save lists and dicts of fewer levels.") from None


def _encode(value: object, what: str, holders: list[object], keep: Callable[[Tensor, str], object]) -> object:
    """Convert a value and everything in it.

    Arguments:
        value: the value.
        what: its name in errors.
        holders: the containers that it is in.
        keep: stores a tensor, and returns its JSON.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ConfigError(f"{what} is a number of more than {_MOST_BITS:,} bits. Save it as bytes.")
    if isinstance(value, str | int | float):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, bytes):
        return {TAG: "bytes", "hex": value.hex()}
    if isinstance(value, Tensor):
        return keep(value, what)
    if any(value is holder for holder in holders):
        raise ConfigError(f"{what} contains itself. Save values that end.")
    inside = [*holders, value]
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{what}[{number}]", inside, keep) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: "tuple", "items": items}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{what} is a {type(value).__name__}, which no checkpoint holds: nothing is pickled. Save numbers, "
            "strings, bytes, tensors, and lists, tuples and dicts of them, such as a state_dict()."
        )
    if all(isinstance(key, str) and key != TAG for key in value):
        return {key: _encode(item, f"{what}[{key!r}]", inside, keep) for key, item in value.items()}
    pairs = [
        [_encode(key, f"a key of {what}", inside, keep), _encode(item, f"{what}[{key!r}]", inside, keep)]
        for key, item in value.items()
    ]
    return {TAG: "dict", "items": pairs}


def _keep(tensors: dict[str, Tensor], name: str, tensor: Tensor, what: str) -> object:
    """Store a tensor under a key that begins with `name`, and return the JSON that names the key."""
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(f"{what} is a tensor that is sparse, complex, quantised or meta. Save a dense, real one.")
    key = f"{name}.{len(tensors)}"
    tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return {TAG: "tensor", "key": key}


def decode(field: Field, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` has converted.

    Arguments:
        field: the JSON.
        tensors: the stored tensors, by key.

    Raises:
        CheckpointError: the JSON is not of `encode`.
    """
    try:
        return _decode(field, tensors)
    except RecursionError:
        raise field.fail("is nested too deeply") from None


def _decode(field: Field, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value and everything that is in it."""
    value = field.value
    if isinstance(value, list):
        return [_decode(item, tensors) for item in field.items()]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors) for key, item in field.entries()}
    tag = field[TAG].string()
    if tag == "tensor":
        key = field["key"].string()
        if key not in tensors:
            raise field.fail(f"names the tensor {key!r}, which is missing")
        return tensors[key]
    if tag == "bytes":
        try:
            return bytes.fromhex(field["hex"].string())
        except ValueError as error:
            raise field["hex"].fail("is not hexadecimal") from error
    items = field["items"].items()
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in items)
    if tag == "dict":
        return _decode_dict(field["items"], tensors)
    raise field.fail(f"is tagged {tag!r}, which this version does not know")


def _decode_dict(field: Field, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    """Decode the items of a dict whose keys are not all strings."""
    decoded: dict[Any, Any] = {}
    alike: Counter[int] = Counter()  # many keys of one hash would make a dict take quadratic time
    for item in field.items():
        key_field, value_field = item.items(2)
        key = _decode(key_field, tensors)
        try:
            alike[hash(key)] += 1
        except TypeError as error:
            raise key_field.fail("is no key") from error
        if alike[hash(key)] > _MOST_ALIKE:
            raise field.fail(f"has more than {_MOST_ALIKE} keys of one hash, which nobody saves")
        decoded[key] = _decode(value_field, tensors)
    return decoded
