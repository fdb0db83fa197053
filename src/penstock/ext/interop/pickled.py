"""The restricted unpickler: files that other libraries have pickled, read as plain values and mapped tensors.

It executes the opcodes that files of torch have, and no others, on values of its own. A name that a pickle looks up is
in a closed list, and stands for something inert: nothing is imported, and no class or function of another library is
called. Memory is charged as values are made: a pickle that makes much more than it has bytes is refused on the way.
Keys of dicts are such that Python hashes them in constant time.

A tensor is compared with its file before it is made: it lies in the file, and no element of the file is two of it. It
is mapped, so it is in memory only while it is copied.
"""

import contextlib
import functools
import io
import pickletools
import stat
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.checkpoint.format import MOST_DIMENSIONS, MOST_NUMEL
from penstock.checkpoint.tensorfiles import DTYPES
from penstock.errors import CheckpointError, PenstockError, one_line
from penstock.files import Field

#: Options of a param group that Penstock's rules have too.
OPTIONS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay"),
    *("momentum", "dampening", "nesterov", "amsgrad", "maximize"),
)
#: The most bytes of a file that are not tensors: names and numbers.
MOST_PICKLE_BYTES = 1 << 26
_MOST_COUNT = 1 << 53
_MOST_DEPTH = 64
#: Values and characters for each byte of a pickle, which can refer to the same value often.
_MOST_TIMES = 8
#: Memory of a pickle's values: indices of torch need 16 bytes for each of theirs.
_SLACK_BYTES, _BYTES_PER_BYTE = 1 << 18, 48
_MOST_NUMBER_KEYS, _LARGEST_NUMBER_KEY = 1 << 12, 1 << 32
_MOST_ARGUMENTS = 256
_MOST_NAME_CHARS, _MOST_RECORD_CHARS = 1 << 12, 64
_LOCAL_HEADER_BYTES = 30
T = TypeVar("T")


class PickleError(Exception):
    """A pickle that is damaged, or holds what is not read."""


@dataclass(eq=False, slots=True)
class Made:
    """Stands for an object: the name of its class, and the state that the pickle sets."""

    name: str
    state: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A tensor that lies in a file, or the storage of some: its elements, from the first on, in a record."""

    dtype: torch.dtype
    record: str
    first: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def read_value(data: bytes, names: Mapping[str, Any]) -> Any:
    """Read the value that a pickle describes.

    Arguments:
        data: the pickle, of protocol 2 to 5.
        names: the classes, functions and constants that it may name, and the stand-in for each.

    Raises:
        PickleError: it is damaged, names something else, or has what no file of torch has.
    """
    machine = _Machine(names)
    try:
        for opcode, argument, position in pickletools.genops(data):
            machine.execute(opcode.name, argument)
            if machine.spent > _SLACK_BYTES + _BYTES_PER_BYTE * (position or 0):
                raise PickleError(
                    f"its first {position:,} bytes are {machine.spent:,} bytes of values, more than such a file needs"
                )
        return machine.take(1)[0]
    except PickleError:
        raise
    except Exception as error:  # another library's bytes: whatever they make of the machine
        raise PickleError(f"it is damaged, {one_line(error)}") from error


class _Machine:
    """Executes the opcodes of one pickle.

    Attributes:
        spent: the bytes of memory of all values that were made.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.spent = 0
        self._names = names
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._number_keys = 0

    def execute(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        match name:
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                self._push(argument)
            case "BINBYTES" | "SHORT_BINBYTES":
                self._push(argument)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                if argument not in (None, len(self._memo)):  # the memo is as long as its largest number
                    raise PickleError("it remembers values out of order")
                self._memo.append(self._stack[-1])
                self.spent += 16
            case "BINGET" | "LONG_BINGET":
                self._refer(self._memo[argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._refer({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "MARK":
                self._marks.append(len(self._stack))
                self.spent += 8
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._push(tuple(self.take(0 if name == "EMPTY_TUPLE" else int(name[-1]))))
            case "TUPLE":
                self._push(tuple(self._take_to_mark()))
            case "EMPTY_LIST" | "EMPTY_DICT":
                self._push([] if name == "EMPTY_LIST" else {})
            case "APPEND" | "APPENDS":
                self._extend(self.take(1) if name == "APPEND" else self._take_to_mark())
            case "SETITEM" | "SETITEMS":
                self._update(self.take(2) if name == "SETITEM" else self._take_to_mark())
            case "GLOBAL" | "STACK_GLOBAL":
                self._find(".".join(argument.split(" ") if name == "GLOBAL" else self.take(2)))
            case "NEWOBJ" | "REDUCE":
                self._call(*self.take(2))
            case "BUILD":
                self._build(*self.take(1))
            case "BINPERSID":
                self._push(_storage(*self.take(1)))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise PickleError(f"it has the opcode {name}, which is not read")

    def take(self, count: int) -> list[Any]:
        """Remove the topmost values of the stack, down to the last mark at most."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise PickleError("it is damaged")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _take_to_mark(self) -> list[Any]:
        return self.take(len(self._stack) - self._marks.pop())

    def _push(self, value: Any) -> None:
        self._stack.append(value)
        self.spent += 8 + sys.getsizeof(value)

    def _refer(self, value: Any) -> None:
        self._stack.append(value)
        self.spent += 8

    def _extend(self, items: list[Any]) -> None:
        (target,) = self.take(1)
        if type(target) is not list:
            raise PickleError("it appends to what is no list")
        self.spent -= sys.getsizeof(target)
        target.extend(items)
        self._push(target)

    def _update(self, items: list[Any]) -> None:
        (target,) = self.take(1)
        keys = items[::2]
        numbers = [key for key in keys if type(key) is int and abs(key) < _LARGEST_NUMBER_KEY]
        self._number_keys += len(numbers)
        others = sum(type(key) in (str, Made) for key in keys)
        if len(numbers) + others < len(keys) or self._number_keys > _MOST_NUMBER_KEYS or type(target) is not dict:
            raise PickleError("it has a dict whose keys are neither names nor few numbers")
        self.spent -= sys.getsizeof(target)
        target.update(zip(keys, items[1::2], strict=True))
        self._push(target)

    def _find(self, name: str) -> None:
        if name not in self._names:
            raise PickleError(f"it names {name[:200]!r}, which is not read")
        self._refer(self._names[name])

    def _call(self, function: Any, arguments: Any) -> None:
        if not callable(function) or type(arguments) is not tuple or len(arguments) > _MOST_ARGUMENTS:
            raise PickleError("it makes an object of what is no class, or of too many arguments")
        self._push(function(*arguments))

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target.state = state
        elif type(target) is not dict:  # an OrderedDict's attributes are left out
            raise PickleError("it sets the state of what is no object")


# Stand-ins for classes and functions. None keeps its arguments, or copies them: one tuple may be given to many.


def inert(module: str, *names: str) -> dict[str, Callable[..., Made]]:
    """Make stand-ins for classes whose objects are told apart by name."""
    return {f"{module}.{name}": functools.partial(_make, name) for name in names}


def _make(name: str, *arguments: Any) -> Made:
    del arguments
    return Made(name)


def extents(value: Any = ()) -> tuple[int, ...]:
    """Read a shape, or another tuple of a number for each dimension: stands for `torch.Size`.

    Raises:
        PickleError: they are no extents, or larger than any tensor's.
    """
    if type(value) is not tuple or len(value) > MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in value):
        raise PickleError("it has no shape where one belongs")
    if prod(extent or 1 for extent in value) > MOST_NUMEL:
        raise PickleError("it has a shape that is larger than any tensor")
    return value


def _storage(pid: Any) -> Stored:
    """Read a reference to a storage: ("storage", its class, its record, the device, its elements)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise PickleError("it has something outside of it that is no storage")
    if not isinstance(pid[1], torch.dtype) or type(pid[2]) is not str or len(pid[2]) > _MOST_RECORD_CHARS:
        raise PickleError("it has a storage without a dtype or a name")
    return Stored(pid[1], pid[2])


def _rebuild_tensor(storage: Any, first: Any, shape: Any, strides: Any, *others: Any) -> Stored:
    shape, strides = extents(shape), extents(strides)
    if type(storage) is not Stored or type(first) is not int or first < 0 or len(shape) != len(strides):
        raise PickleError("it has a tensor that is none")
    return Stored(storage.dtype, storage.record, first, shape, strides)


def _rebuild_parameter(tensor: Any, *others: Any) -> Stored:
    if type(tensor) is not Stored:
        raise PickleError("it has a parameter that is no tensor")
    return tensor


def _rebuild_with_attributes(function: Any, kind: Any, arguments: Any, state: Any) -> Stored:
    if function is not _rebuild_tensor or type(arguments) is not tuple:
        raise PickleError("it has a tensor of another class")
    stored: Stored = _rebuild_tensor(*arguments)
    return stored


def _ordered_dict() -> dict[Any, Any]:
    return {}


_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    "Bool": torch.bool,
}
DTYPE_NAMES: Mapping[str, Any] = {str(dtype): dtype for dtype in DTYPES.values()}
#: What a file of `torch.save` names that holds tensors and plain values.
TENSOR_NAMES: Mapping[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_with_attributes,
    **inert("torch", "Tensor", "device"),
    "torch.Size": extents,
    "collections.OrderedDict": _ordered_dict,
    **DTYPE_NAMES,
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
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
        shape, size, numel = one_line(str(tensor.shape), 80), tensor.dtype.itemsize, prod(tensor.shape)
        count = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
        if not numel:
            return torch.empty(0, dtype=torch.uint8)
        if numel > count:
            raise PickleError(f"it is a tensor of shape {shape}, more elements than it has")
        header, nbytes = self._records.get(f"data/{tensor.record}", (self._mapped.numel(), 0))
        begin = header + _LOCAL_HEADER_BYTES
        if begin <= self._mapped.numel():
            begin += sum(struct.unpack("<HH", bytes(self._mapped[begin - 4 : begin].tolist())))  # a name, and padding
        if (tensor.first + count) * size > nbytes or begin + nbytes > self._mapped.numel():
            raise PickleError(f"it is a tensor of shape {shape} that does not lie in the file")
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
                can refer to the same value often.
        """
        left = self._mapped.numel() + _MOST_TIMES * self._pickle_bytes

        def copy(value: Any, depth: int) -> Any:
            nonlocal left
            left -= 1 + (len(value) if isinstance(value, str | bytes) else 0)
            left -= self.elements(value).numel() if type(value) is Stored else 0
            if depth > _MOST_DEPTH:
                raise PickleError("it is nested too deeply")
            if left < 0:
                raise PickleError("it has more in it than the file has bytes")
            if type(value) is Stored:
                return self.tensor(value).clone()
            if type(value) is dict:
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
        """Move to a position, and return it."""
        self._at = max(0, (0, self._at, self._window.numel())[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read up to as many bytes as a buffer has, and return their number."""
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


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Report in one line what goes wrong inside, around all that reads a checkpoint and computes with its values.

    Raises:
        CheckpointError: another library has raised something; errors of our own stay as they are.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # files say anything, and so does what they make of torch
        raise refused(folder, f"{folder} is not read: {one_line(error)}.") from error


def most_bytes(nbytes: int) -> int:
    """Bound what is written of files of so many bytes: about as many, and more where parameters are many and small."""
    return (1 << 26) + 16 * nbytes


def shape(field: Field) -> tuple[int, ...]:
    """Read the extents of a tensor that lies elsewhere.

    Raises:
        CheckpointError: they are no extents, or larger than any tensor's.
    """
    return _of(field, extents)


def named(field: Field) -> Mapping[str, Field]:
    """Read the values of a dict whose keys are names.

    Raises:
        CheckpointError: it is no dict, or a key is not a name.
    """
    keys: Iterable[Any] = field.mapping()
    for key in keys:
        if not isinstance(key, str) or len(key) > _MOST_NAME_CHARS or not key.isprintable():
            raise field.fail(f"has the key {one_line(repr(key), 80)}, which is not a name")
    return dict(field.entries())
