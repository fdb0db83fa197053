"""Pickles that other libraries have written, read as plain values and as tensors where they lie in the file.

No pickle is believed. It is read in two passes:

1. `_scan` goes over its opcodes without making an object, and refuses opcodes, keys of dicts and amounts of memory that
   no file of these formats has.
2. `pickle.Unpickler` makes the value. `find_class` knows a closed list of names, and has an inert stand-in for each:
   nothing is imported, and no class of another library is called.

What the value says of a tensor is held against the file before the tensor is made: it lies in the file, and no element
of the file is two of it. A tensor is mapped, so it is in memory only while it is copied.
"""

import io
import pickle
import pickletools
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import CheckpointError, one_line
from penstock.files import Field
from penstock.integrations.engine_internals import DTYPES, MOST_DIMENSIONS, MOST_NUMEL

#: The most bytes of a file that are not tensors: names and numbers.
MOST_PICKLE_BYTES = 1 << 26
_MOST_COUNT = 1 << 53
_MOST_DEPTH = 64
#: Values and characters for each byte of a pickle, which can say the same thing often.
_MOST_TIMES = 8
#: Memory of a pickle's values, as `_BYTES` counts it: indices of torch need up to 32 bytes for each of theirs.
_SLACK_BYTES, _BYTES_PER_BYTE = 1 << 18, 48
#: Dict keys that are numbers. Python's hash of a number is known, so many of them can be made to collide.
_MOST_NUMBERS = 1 << 12
_MOST_ARGUMENTS = 256
_MOST_NAME_CHARS, _MOST_RECORD_CHARS = 1 << 12, 64
_LOCAL_HEADER_BYTES = 30
T = TypeVar("T")

_KEYS, _NUMBERS = {"BINUNICODE", "SHORT_BINUNICODE", "NEWOBJ"}, {"BININT", "BININT1", "BININT2"}
_PUTS, _ITEMS, _CALLS = ("BINPUT", "LONG_BINPUT", "MEMOIZE"), ("SETITEM", "SETITEMS"), ("NEWOBJ", "REDUCE")
_TUPLES = ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")
#: The opcodes that are read, by the bytes that each makes beside its argument. A place on the stack takes 8 bytes, one
#: in the memo 16; an empty dict is charged as one of five keys.
_OPCODES_BY_BYTES = {
    0: "PROTO FRAME STOP BUILD SETITEM SETITEMS",
    8: "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES "
    "SHORT_BINBYTES MARK EMPTY_TUPLE BINGET LONG_BINGET GLOBAL STACK_GLOBAL",
    16: "BINPUT LONG_BINPUT MEMOIZE",
    32: "APPEND APPENDS",
    48: "NEWOBJ",
    64: "EMPTY_LIST TUPLE TUPLE1",
    80: "TUPLE2 TUPLE3",
    128: "REDUCE BINPERSID",
    232: "EMPTY_DICT",
}
_BYTES = {name: nbytes for nbytes, names in _OPCODES_BY_BYTES.items() for name in names.split()}


class PickleError(Exception):
    """A pickle that is damaged, or holds what is not read."""


def read_value(data: bytes, names: Mapping[str, Any]) -> Any:
    """Read the value that a pickle describes.

    Arguments:
        data: the pickle, of protocol 2 to 5.
        names: the classes, functions and constants that it may name, and the stand-in for each.

    Raises:
        PickleError: it is damaged, names something else, or has what no file of torch has.
    """
    try:
        _scan(data)
        return _Unpickler(data, names).load()
    except PickleError:
        raise
    except Exception as error:  # another library's bytes: whatever they make of the unpickler
        raise PickleError(f"it is damaged, {one_line(error)}") from error


def _scan(data: bytes) -> None:
    """Refuse a pickle that is more than such a file needs, before an object of it is made.

    The stack and the memo are followed as far as the opcode that made each value: keys of dicts are strings, few
    numbers, or objects, all of which Python hashes in constant time.
    """
    stack: list[str] = []
    marks: list[int] = []
    memo: list[str] = []
    argument: Any
    position: Any  # it is None only in a file without a place
    spent = numbers = 0
    for opcode, argument, position in pickletools.genops(data):
        name, before = opcode.name, opcode.stack_before
        if name not in _BYTES:
            raise PickleError(f"it has the opcode {name} at byte {position:,}, which is not read")
        if spent > _SLACK_BYTES + _BYTES_PER_BYTE * position:
            raise PickleError(
                f"its first {position:,} bytes are {spent:,} bytes of values, more than such a file needs"
            )
        spent += _BYTES[name] + (0 if argument is None else sys.getsizeof(argument))
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name in _PUTS:
            if argument not in (None, len(memo)):  # the memo is as long as its largest number
                raise PickleError("it remembers values out of order")
            memo.append(stack[-1])
            continue
        to_mark = pickletools.markobject in before
        start = (marks.pop() - len(before) + 2) if to_mark else (len(stack) - len(before))
        if start < (marks[-1] if marks else 0):
            raise PickleError(f"it is damaged at byte {position:,}")
        taken = stack[start:]
        del stack[start:]
        if name in _ITEMS:
            keys = taken[1::2]
            spent += 104 * max(0, len(keys) - 5) if to_mark else 104
            numbers += sum(key in _NUMBERS for key in keys)
            if numbers > _MOST_NUMBERS or not {*keys} <= _KEYS | _NUMBERS:
                raise PickleError("it has a dict whose keys are neither names nor few numbers")
        elif name == "BUILD" and taken[0] not in _CALLS:
            raise PickleError("it sets the state of what is no object")
        elif name in _CALLS and not (taken[0] in ("GLOBAL", "STACK_GLOBAL") and taken[1] in _TUPLES):
            raise PickleError("it makes an object of what is no class, or of too many arguments")
        if name in (*_ITEMS, "APPEND", "APPENDS", "BUILD"):
            stack.append(taken[0])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.stack_after:
            stack.append("long tuple" if len(taken) > _MOST_ARGUMENTS else name)


class _Unpickler(pickle.Unpickler):
    """The unpickler that knows a closed list of names, and of what lies outside of a pickle the storages of tensors."""

    def __init__(self, data: bytes, names: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """Give the stand-in for a name."""
        whole = f"{module}.{name}"
        if whole not in self._names:
            raise PickleError(f"it names {whole[:200]!r}, which is not read")
        return self._names[whole]

    def persistent_load(self, pid: Any) -> "Stored":
        """Note a storage: ("storage", its class, its record, the device, its elements)."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise PickleError("it has something outside of it that is no storage")
        if not isinstance(pid[1], torch.dtype) or type(pid[2]) is not str or len(pid[2]) > _MOST_RECORD_CHARS:
            raise PickleError("it has a storage without a dtype or a name")
        return Stored(pid[1], pid[2])


# What stands in for classes and functions. None keeps its arguments, or copies them: one tuple may be given to many.


class Made:
    """Stands for an object: its class is the one that the pickle names, and its state what the pickle sets."""

    __slots__ = ("state",)

    def __new__(cls, *arguments: Any) -> "Made":
        """Make one, whatever it is called with."""
        del arguments
        made = super().__new__(cls)
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep what the pickle sets."""
        self.state = state


class _Dict(dict[Any, Any]):
    """Stands for an `OrderedDict`; what else is set of it is left out."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Leave it out."""


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A tensor that lies in a file, or the storage of some: its elements, from the first on, in a record."""

    dtype: torch.dtype
    record: str
    first: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def made(name: str) -> type[Made]:
    """Make the stand-in for a class whose objects are told apart by its name."""
    return type(name, (Made,), {"__slots__": ()})


def extents(value: Any = ()) -> tuple[int, ...]:
    """Read a shape, or what else has a number for each dimension: stands for `torch.Size`.

    Raises:
        PickleError: they are no extents, or larger than any tensor's.
    """
    if type(value) is not tuple or len(value) > MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in value):
        raise PickleError("it has no shape where one belongs")
    if prod(extent or 1 for extent in value) > MOST_NUMEL:
        raise PickleError("it has a shape that is larger than any tensor")
    return value


def _rebuild_tensor(
    storage: Any, first: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Stored:
    del requires_grad, hooks, metadata
    shape, strides = extents(shape), extents(strides)
    if type(storage) is not Stored or type(first) is not int or first < 0 or len(shape) != len(strides):
        raise PickleError("it has a tensor that is none")
    return Stored(storage.dtype, storage.record, first, shape, strides)


def _rebuild_parameter(tensor: Any, requires_grad: Any, hooks: Any) -> Stored:
    del requires_grad, hooks
    if not isinstance(tensor, Stored):
        raise PickleError("it has a parameter that is no tensor")
    return tensor


def _rebuild_with_attributes(function: Any, kind: Any, arguments: Any, state: Any) -> Stored:
    del kind, state
    if function is not _rebuild_tensor or type(arguments) is not tuple:
        raise PickleError("it has a tensor of another class")
    stored: Stored = _rebuild_tensor(*arguments)
    return stored


DTYPE_NAMES: Mapping[str, Any] = {str(dtype): dtype for dtype in DTYPES.values()}
#: What a file of `torch.save` names that holds tensors and plain values.
TENSOR_NAMES: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_with_attributes,
    "torch.Tensor": Made,
    "torch.device": Made,
    "torch.Size": extents,
    "collections.OrderedDict": _Dict,
    **DTYPE_NAMES,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


class Archive:
    """What `torch.save` has written, in bytes that are mapped.

    Arguments:
        mapped: the bytes: a file, or part of one.
        names: what its pickle may name, and the stand-in for each.

    Attributes:
        value: the whole value; its tensors are `Stored`.

    Raises:
        PickleError: it is no archive of torch, is compressed, or its pickle is not read.
    """

    def __init__(self, mapped: Tensor, names: Mapping[str, Any]) -> None:
        self._mapped = mapped
        try:
            with zipfile.ZipFile(_Window(mapped)) as archive:
                parts = {part.filename.partition("/")[2]: part for part in archive.infolist()}
                if any(part.compress_type != zipfile.ZIP_STORED or part.flag_bits & 1 for part in parts.values()):
                    raise PickleError("it is compressed, which torch.save does not do")
                if sum(part.file_size for part in parts.values()) > mapped.numel():
                    raise PickleError("it says that it holds more than it has bytes")
                if parts["data.pkl"].file_size > MOST_PICKLE_BYTES:
                    raise PickleError(f"it holds more than {MOST_PICKLE_BYTES:,} bytes beside tensors")
                if "byteorder" in parts and archive.read(parts["byteorder"]) != b"little":
                    raise PickleError("it was saved on a machine of the other byte order")
                data = archive.read(parts["data.pkl"])
        except PickleError:
            raise
        except Exception as error:  # another library's bytes: whatever they make of the reader
            raise PickleError(f"it is not what torch.save writes, {one_line(error)}") from error
        self._pickle_bytes = len(data)
        self._records = {name: (part.header_offset, part.file_size) for name, part in parts.items()}
        self.value = read_value(data, names)

    def elements(self, tensor: Any) -> Tensor:
        """Map the bytes of a tensor, from its first element to its last.

        Raises:
            PickleError: it is no tensor, does not lie here as a whole, or says that some elements are several.
        """
        if type(tensor) is not Stored:
            raise PickleError("it is not a tensor")
        size, numel = tensor.dtype.itemsize, prod(tensor.shape)
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
        if not numel:
            return torch.empty(0, dtype=torch.uint8)
        if numel > count:
            raise PickleError(f"it is a tensor of shape {_shown(tensor.shape)}, more elements than it has")
        header, nbytes = self._records.get(f"data/{tensor.record}", (-1, 0))
        begin = header + _LOCAL_HEADER_BYTES
        if header >= 0 and begin <= self._mapped.numel():
            begin += sum(struct.unpack("<HH", bytes(self._mapped[begin - 4 : begin].tolist())))  # a name, and padding
        if header < 0 or (tensor.first + count) * size > nbytes or begin + nbytes > self._mapped.numel():
            raise PickleError(f"it is a tensor of shape {_shown(tensor.shape)} that does not lie in the file")
        return self._mapped[begin + tensor.first * size :][: count * size]

    def tensor(self, tensor: Any) -> Tensor:
        """Map a tensor; copy it where it lies between the addresses that its dtype needs.

        Raises:
            PickleError: as `elements`.
        """
        elements = self.elements(tensor)
        if elements.storage_offset() % tensor.dtype.itemsize:
            elements = elements.clone()
        typed = elements.view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.strides) if typed.numel() else typed.view(tensor.shape)

    def plain(self, value: Any) -> Any:
        """Copy numbers, strings and tensors, and lists, tuples and dicts of them.

        Raises:
            PickleError: it holds something else, is nested deeply, or has more in it than the file has bytes: a pickle
                can say the same thing often.
        """
        left, tensors_left = _MOST_TIMES * self._pickle_bytes, self._mapped.numel()

        def copy(value: Any, depth: int) -> Any:
            nonlocal left, tensors_left
            left -= 1 + (len(value) if isinstance(value, str | bytes) else 0)
            if depth > _MOST_DEPTH:
                raise PickleError("it is nested too deeply")
            if type(value) is Stored:
                tensors_left -= self.elements(value).numel()
            if left < 0 or tensors_left < 0:
                raise PickleError("it has more in it than the file has bytes")
            if type(value) is Stored:
                return self.tensor(value).clone()
            if isinstance(value, dict):
                return {key: copy(item, depth + 1) for key, item in value.items()}
            if type(value) in (list, tuple):
                return type(value)(copy(item, depth + 1) for item in value)
            if value is not None and type(value) not in (bool, int, float, str, bytes):
                raise PickleError(f"it holds {type(value).__name__}, which is no plain value")
            return value

        return copy(value, 0)


class _Window(io.RawIOBase):
    """Bytes that are mapped, as a file."""

    def __init__(self, window: Tensor) -> None:
        self._window = window
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere."""
        self._at = max(0, (0, self._at, self._window.numel())[whence] + offset)
        return self._at

    def tell(self) -> int:
        """Tell where one is."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read on."""
        part = self._window[self._at : self._at + len(buffer)]
        buffer[: part.numel()] = part.numpy().tobytes()
        self._at += part.numel()
        return part.numel()


class PickledFile:
    """One file of `torch.save`.

    Arguments:
        path: where the file is.
        names: what its pickle may name beside tensors, and the stand-in for each.

    Attributes:
        content: the whole value; its tensors are `Stored`, `tensor` maps them.
        nbytes: the size of the file.

    Raises:
        CheckpointError: it is no such file, or holds something else.
    """

    def __init__(self, path: Path, names: Mapping[str, Any]) -> None:
        mapped = map_file(path)
        self.nbytes = mapped.numel()
        try:
            self._archive = Archive(mapped, {**TENSOR_NAMES, **names})
        except PickleError as error:
            raise not_read(path, str(error)) from error
        self.content = Field(path, "", self._archive.value)

    def tensor(self, field: Field) -> Tensor:
        """Map a tensor of the content.

        Raises:
            CheckpointError: as `Archive.elements`.
        """
        return _of(field, self._archive.tensor)

    def count(self, field: Field) -> int:
        """Read a whole number that may be a tensor.

        Raises:
            CheckpointError: it is no whole number, or is negative.
        """
        value = self.tensor(field).item() if type(field.value) is Stored else field.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_COUNT:
            raise field.fail("is not a count")
        if value != int(value):
            raise field.fail("is not a whole number")
        return int(value)

    def plain(self, field: Field) -> Any:
        """Copy a value with everything that is in it.

        Raises:
            CheckpointError: as `Archive.plain`.
        """
        return _of(field, self._archive.plain)


def _of(field: Field, read: Callable[[Any], T]) -> T:
    """Read a field's value; errors name the field."""
    try:
        return read(field.value)
    except PickleError as error:
        raise field.fail(str(error).removeprefix("it ")) from error


def map_file(path: Path) -> Tensor:
    """Map a file as bytes.

    Raises:
        CheckpointError: there is none, or it is no regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise refused(path, f"{path} is missing.") from error
    if not stat.S_ISREG(status.st_mode):
        raise refused(path, f"{path} is not a file.")
    mapped: Any = torch.UntypedStorage.from_file(str(path), False, status.st_size)
    return torch.empty(0, dtype=torch.uint8).set_(mapped)


def refused(path: Path, message: str) -> CheckpointError:
    """Make the error that names a file."""
    return CheckpointError(message, file=str(path))


def not_read(path: Path, why: str) -> CheckpointError:
    """Make the error of a file that is damaged, or holds what is not read."""
    return refused(
        path,
        f"{path} is not read: {why}. Copy it again from where it was saved. Of pickles, tensors and plain values are "
        "read: save nothing else.",
    )


def shape(field: Field) -> tuple[int, ...]:
    """Read the extents of a tensor that lies elsewhere.

    Raises:
        CheckpointError: they are no extents, or larger than any tensor's.
    """
    return _of(field, extents)


def mapping(field: Field) -> Mapping[Any, Any]:
    """Read a dict.

    Raises:
        CheckpointError: it is no dict.
    """
    if not isinstance(field.value, Mapping):
        raise field.fail("is not a dict")
    return field.value


def named(field: Field) -> Mapping[str, Field]:
    """Read the values of a dict whose keys are names.

    Raises:
        CheckpointError: it is no dict, or a key is not a name.
    """
    for key in mapping(field):
        if not isinstance(key, str) or len(key) > _MOST_NAME_CHARS or not key.isprintable():
            raise field.fail(f"has the key {one_line(repr(key), 80)}, which is not a name")
    return dict(field.entries())


def _shown(extents: Sequence[int]) -> str:
    """Write a shape for a message, cut where it is long."""
    return one_line(str(tuple(extents)), 80)
