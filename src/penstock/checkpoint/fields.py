"""JSON that somebody else may have written: every value is checked for what it must be before it is used."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from penstock.errors import CheckpointError

T = TypeVar("T")

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

    Arguments:
        file: for messages.
        path: of the value: "units[3].slots".
        value: as parsed.
    """

    def __init__(self, file: Path, path: str, value: object) -> None:
        self.file = file
        self.path = path
        self.value = value

    def fail(self, why: str) -> CheckpointError:
        """The error that names the file and the field."""
        return CheckpointError(f"{self.file}: '{self.path}' {why}.", file=str(self.file), field=self.path)

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
            raise self.fail(f"is {value:,}, outside {least:,} to {most:,}")
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
        extents = tuple(item.integer() for item in self.items())
        if math.prod(extents) > 1 << 50:
            raise self.fail(f"is {extents}, larger than any tensor")
        return extents

    def optional(self, read: Callable[["Field"], T]) -> T | None:
        """`None`, or what `read` gives."""
        return None if self.value is None else read(self)

    def items(self, count: int | None = None) -> list["Field"]:
        """The items of a list."""
        value: Sequence[object] = self._expect(list, "a list")
        if count is not None and len(value) != count:
            raise self.fail(f"has {len(value)} items, not {count}")
        return [Field(self.file, f"{self.path}[{number}]", item) for number, item in enumerate(value)]

    def entries(self) -> Iterator[tuple[str, "Field"]]:
        """The keys and values of an object."""
        value: Mapping[str, object] = self._expect(dict, "an object")
        for key, item in value.items():
            yield key, Field(self.file, f"{self.path}.{key}" if self.path else key, item)

    def __getitem__(self, key: str) -> "Field":
        """A value of an object."""
        value: Mapping[str, object] = self._expect(dict, "an object")
        inner = f"{self.path}.{key}" if self.path else key
        if key not in value:
            raise CheckpointError(f"{self.file}: '{inner}' is missing.", file=str(self.file), field=inner)
        return Field(self.file, inner, value[key])


def parse(file: Path, text: bytes) -> Field:
    """Read a JSON file's bytes.

    Raises:
        CheckpointError: they are not JSON.
    """
    try:
        return Field(file, "", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON ({error}).", file=str(file), field="") from error


def to_bytes(value: object) -> bytes:
    """JSON, with keys in their order: what was read from these bytes gives the same bytes again."""
    return json.dumps(value, separators=(",", ":")).encode()
