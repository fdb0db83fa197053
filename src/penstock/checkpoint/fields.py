"""JSON that somebody else may have written: every value is checked for what it must be before it is used.

What a file must hold is declared as types (`reader`), or asked for value by value (`Field`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch

from penstock.checkpoint.tensorfiles import DTYPES
from penstock.errors import CheckpointError, one_line

T = TypeVar("T")

#: Of a tensor: more than any has, few enough that nothing about a shape takes long.
MOST_DIMENSIONS = 64
MOST_NUMEL = 1 << 50
MOST_CHECKSUM = 0xFFFFFFFF
_MOST_CHARS = 500
_MOST_PATH_CHARS = 200


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as files do: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}


class Field:
    """One value of a JSON file, and where in the file it is.

    It costs little, whatever the keys are that lead to it: its path is put together when somebody asks.

    Arguments:
        file: the file, for messages.
        path: the key or the number that leads to the value; or its whole path, "units[3].slots".
        value: the value as it was parsed.
        holder: the field that the value is in, if it is in one.
    """

    __slots__ = ("_holder", "_path", "file", "value")

    def __init__(self, file: Path, path: str | int, value: object, holder: "Field | None" = None) -> None:
        self.file = file
        self.value = value
        self._path = path
        self._holder = holder

    @property
    def path(self) -> str:
        """Tell where the value is: "units[3].slots"."""
        parts: list[str] = []
        field: Field | None = self
        while field is not None:
            part = field._path
            parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
            field = field._holder
        return "".join(reversed(parts)).lstrip(".")

    def _inside(self, path: str | int, value: object) -> "Field":
        return Field(self.file, path, value, self)

    def fail(self, why: str) -> CheckpointError:
        """Make the error that names the file and the field; the caller raises it."""
        path = one_line(self.path, _MOST_PATH_CHARS)
        return CheckpointError(f"{self.file}: '{path}' {one_line(why, _MOST_CHARS)}.", file=str(self.file), field=path)

    def _expect(self, kinds: type | tuple[type, ...], what: str) -> Any:
        if not isinstance(self.value, kinds) or (isinstance(self.value, bool) and kinds is not bool):
            raise self.fail(f"is not {what}")
        return self.value

    def string(self) -> str:
        """Read a string."""
        return str(self._expect(str, "a string"))

    def integer(self, least: int = 0, most: int = 1 << 62) -> int:
        """Read a whole number within bounds."""
        value = int(self._expect(int, "a whole number"))
        if not least <= value <= most:
            raise self.fail(f"is {one_line(f'{value:,}', 80)}, outside {least:,} to {most:,}")
        return value

    def multiple(self, of: int, least: int = 0) -> int:
        """Read a whole number that is a multiple of another."""
        value = self.integer(least)
        if value % of:
            raise self.fail(f"is {value:,}, not a multiple of {of}")
        return value

    def number(self) -> float:
        """Read a finite number."""
        value = self._expect((int, float), "a number")
        try:
            value = float(value)
        except OverflowError as error:
            raise self.fail("is too large") from error
        if not math.isfinite(value):
            raise self.fail("is not finite")
        return float(value)

    def boolean(self) -> bool:
        """Read true or false."""
        return bool(self._expect(bool, "true or false"))

    def dtype(self) -> torch.dtype:
        """Read the name of a dtype."""
        found = _DTYPES.get(self.string())
        if found is None:
            raise self.fail(f"is {self.value!r}, not a dtype")
        return found

    def shape(self) -> tuple[int, ...]:
        """Read the shape of a tensor."""
        sizes = self.integers()
        if len(sizes) > MOST_DIMENSIONS or math.prod(size or 1 for size in sizes) > MOST_NUMEL:
            raise self.fail(f"is larger than any tensor: {sizes[:MOST_DIMENSIONS]}")
        return sizes

    def integers(self, count: int | None = None, *, most: int = 1 << 62) -> tuple[int, ...]:
        """Read a list of whole numbers within bounds; as `items` does, without a field for each."""
        value = self._list(count)
        for number, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= most:
                self._inside(number, item).integer(most=most)
        return tuple(value)

    def strings(self) -> tuple[str, ...]:
        """Read a list of strings; as `items` does, without a field for each."""
        value = self._list(None)
        for number, item in enumerate(value):
            if not isinstance(item, str):
                self._inside(number, item).string()
        return tuple(value)

    def items(self, count: int | None = None) -> Iterator["Field"]:
        """Go through the items of a list, which has `count` of them where that is given."""
        return (self._inside(number, item) for number, item in enumerate(self._list(count)))

    def _list(self, count: int | None) -> Sequence[Any]:
        value: Sequence[Any] = self._expect(list, "a list")
        if count is not None and len(value) != count:
            raise self.fail(f"has {len(value)} items, not {count}")
        return value

    def _object(self) -> Mapping[str, object]:
        value: Mapping[str, object] = self._expect(dict, "an object")
        return value

    def entries(self) -> Iterator[tuple[str, "Field"]]:
        """Go through the keys and values of an object."""
        for key, item in self._object().items():
            yield key, self._inside(key, item)

    def __contains__(self, key: str) -> bool:
        """Whether an object has a key."""
        return key in self._object()

    def __getitem__(self, key: str) -> "Field":
        """Find a value of an object."""
        if key not in self:
            raise self._inside(key, None).fail("is missing")
        return self._inside(key, self._object()[key])


_PLAIN: Mapping[Any, Callable[[Field], Any]] = {
    str: Field.string,
    int: Field.integer,
    float: Field.number,
    bool: Field.boolean,
    torch.dtype: Field.dtype,
    tuple[str, ...]: Field.strings,
    object: lambda field: field.value,
}


def reader(kind: type[T]) -> Callable[[Field], T]:
    """Make the function that checks a field's value, and gives it as the type that is declared.

        str, bool, torch.dtype    one of them
        int, float                a number that is not negative; one that is finite
        object                    whatever it is, as it was parsed
        Annotated[T, read]        what `read` gives of the field
        T | None                  null, or a `T`
        tuple[T, ...]             a list of any length
        Mapping[str, T]           an object with any keys
        a named tuple             a list of its fields
        a dataclass               an object with its fields as keys; one whose default is `None` may be missing

    Arguments:
        kind: the type.

    Returns:
        A function of a field. It raises `CheckpointError`, which names the field, where a value is not of the type.
    """
    declared: Any = kind
    if declared in _PLAIN:
        return _PLAIN[declared]
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        read: Callable[[Field], T] = arguments[1]
        return read
    if origin is not None:
        return _generic_reader(origin, reader(arguments[1] if origin is Mapping else arguments[0]))
    hints = get_type_hints(kind, include_extras=True)
    readers = {name: reader(hint) for name, hint in hints.items()}
    if issubclass(kind, tuple):
        return lambda field: kind(
            *(read(item) for read, item in zip(readers.values(), field.items(len(readers)), strict=True))
        )
    may_lack = {member.name for member in fields(declared) if member.default is None}

    def read_object(field: Field) -> T:
        there = [name for name in readers if name not in may_lack or name in field]
        return kind(**{name: readers[name](field[name]) for name in there})

    return read_object


def _generic_reader(origin: Any, read: Callable[[Field], Any]) -> Callable[[Field], Any]:
    """Make the reader of `Mapping[str, T]`, `tuple[T, ...]` or `T | None`, of that of `T`."""
    if origin is Mapping:
        return lambda field: {name: read(item) for name, item in field.entries()}
    if origin is tuple:
        return lambda field: tuple(read(item) for item in field.items())
    return lambda field: None if field.value is None else read(field)


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
    """Estimate what the values of a JSON text take in memory, about and at most, without reading them."""
    return (
        2 * len(text)
        + 64 * text.count(b"[")
        + 232 * text.count(b"{")  # with a first key
        + 104 * text.count(b":")
        + 40 * text.count(b",")  # a number, and its place
        + 25 * text.count(b'"')
    )


def to_bytes(value: object) -> bytes:
    """Write JSON, with keys in their order: what was read from these bytes gives the same bytes again.

    What `reader` reads is written as it reads it.
    """
    return json.dumps(value, separators=(",", ":"), default=_as_json).encode()


def _as_json(value: Any) -> object:
    """Say a dtype or a dataclass by what JSON has; a dataclass may do so itself (`to_json`)."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    own = getattr(value, "to_json", None)
    return own() if own is not None else members(value)


def members(value: Any) -> dict[str, object]:
    """Give the fields of a dataclass by name, in their order, without those that `reader` takes for `None`."""
    assert is_dataclass(value), f"JSON has nothing like {value!r}"
    return {
        member.name: item
        for member in fields(value)
        if (item := getattr(value, member.name)) is not None or member.default is not None
    }
