"""JSON that somebody else may have written: every value is checked for what it must be before it is used."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.errors import CheckpointError, one_line

T = TypeVar("T")

#: Of a tensor: more than any has, few enough that nothing about a shape takes long.
MOST_DIMENSIONS = 64
MOST_NUMEL = 1 << 50
_MOST_CHARS = 500
_MOST_PATH_CHARS = 200

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """As in files: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Field:
    """One value of a JSON file, and where in it.

    It costs little, whatever the keys are that lead to it: its path is put together when somebody asks.

    Arguments:
        file: for messages.
        path: of the value: "units[3].slots".
        value: as parsed.
        holder: that it is in; `path` is what follows the holder's.
    """

    __slots__ = ("_holder", "_path", "file", "value")

    def __init__(self, file: Path, path: str | int, value: object, holder: "Field | None" = None) -> None:
        self.file = file
        self.value = value
        self._path = path
        self._holder = holder

    @property
    def path(self) -> str:
        """Where it is: "units[3].slots"."""
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
        """The error that names the file and the field."""
        path = one_line(self.path, _MOST_PATH_CHARS)
        return CheckpointError(f"{self.file}: '{path}' {one_line(why, _MOST_CHARS)}.", file=str(self.file), field=path)

    def _expect(self, kinds: type | tuple[type, ...], what: str) -> Any:
        if not isinstance(self.value, kinds) or (isinstance(self.value, bool) and kinds is not bool):
            raise self.fail(f"is not {what}")
        return self.value

    def string(self) -> str:
        """A string."""
        return str(self._expect(str, "a string"))

    def integer(self, least: int = 0, most: int = 1 << 62) -> int:
        """A whole number within bounds."""
        value = int(self._expect(int, "a whole number"))
        if not least <= value <= most:
            raise self.fail(f"is {one_line(f'{value:,}', 80)}, outside {least:,} to {most:,}")
        return value

    def multiple(self, of: int, least: int = 0) -> int:
        """A whole number, a multiple of another."""
        value = self.integer(least)
        if value % of:
            raise self.fail(f"is {value:,}, not a multiple of {of}")
        return value

    def number(self) -> float:
        """A finite number."""
        value = self._expect((int, float), "a number")
        try:
            value = float(value)
        except OverflowError as error:
            raise self.fail("is too large") from error
        if not math.isfinite(value):
            raise self.fail("is not finite")
        return float(value)

    def boolean(self) -> bool:
        """True or false."""
        return bool(self._expect(bool, "true or false"))

    def dtype(self) -> torch.dtype:
        """A dtype's name."""
        found = DTYPES.get(self.string())
        if found is None:
            raise self.fail(f"is {self.value!r}, not a dtype")
        return found

    def shape(self) -> tuple[int, ...]:
        """The extents of a tensor."""
        extents = self.integers()
        if len(extents) > MOST_DIMENSIONS or math.prod(extent or 1 for extent in extents) > MOST_NUMEL:
            raise self.fail(f"is larger than any tensor: {extents[:MOST_DIMENSIONS]}")
        return extents

    def integers(self, count: int | None = None, *, most: int = 1 << 62) -> tuple[int, ...]:
        """A list of whole numbers within bounds; as `items`, without a field for each."""
        value = self._list(count)
        for number, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= most:
                self._inside(number, item).integer(most=most)
        return tuple(value)

    def strings(self) -> tuple[str, ...]:
        """A list of strings; as `items`, without a field for each."""
        value = self._list(None)
        for number, item in enumerate(value):
            if not isinstance(item, str):
                self._inside(number, item).string()
        return tuple(value)

    def optional(self, read: Callable[["Field"], T]) -> T | None:
        """`None`, or what `read` gives."""
        return None if self.value is None else read(self)

    def items(self, count: int | None = None) -> Iterator["Field"]:
        """The items of a list, one after the other."""
        return (self._inside(number, item) for number, item in enumerate(self._list(count)))

    def _list(self, count: int | None) -> Sequence[Any]:
        value: Sequence[Any] = self._expect(list, "a list")
        if count is not None and len(value) != count:
            raise self.fail(f"has {len(value)} items, not {count}")
        return value

    def entries(self) -> Iterator[tuple[str, "Field"]]:
        """The keys and values of an object."""
        value: Mapping[str, object] = self._expect(dict, "an object")
        for key, item in value.items():
            yield key, self._inside(key, item)

    def __getitem__(self, key: str) -> "Field":
        """A value of an object."""
        value: Mapping[str, object] = self._expect(dict, "an object")
        if key not in value:
            raise self._inside(key, None).fail("is missing")
        return self._inside(key, value[key])


def parse(file: Path, text: bytes, *, most_bytes: int) -> Field:
    """Read a JSON file's bytes.

    Arguments:
        file: for messages.
        text: its bytes.
        most_bytes: of memory that its values may take; a byte of JSON can become eighty.

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
    """What the values of a JSON text take in memory, about and at most; known without reading them."""
    return (
        2 * len(text)
        + 64 * text.count(b"[")
        + 232 * text.count(b"{")  # with a first key
        + 104 * text.count(b":")
        + 40 * text.count(b",")  # a number, and its place
        + 25 * text.count(b'"')
    )


def to_bytes(value: object) -> bytes:
    """JSON, with keys in their order: what was read from these bytes gives the same bytes again."""
    return json.dumps(value, separators=(",", ":")).encode()
