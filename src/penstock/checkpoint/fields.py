"""JSON of checkpoints, parsed within bounds of memory; dtypes and shapes of tensors in it; and how it is written."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch

from penstock.checkpoint.tensorfiles import DTYPES
from penstock.errors import CheckpointError, one_line
from penstock.typedfiles import Field, members

#: Of a tensor: more than any has, few enough that nothing about a shape takes long.
MOST_DIMENSIONS = 64
MOST_NUMEL = 1 << 50
MOST_CHECKSUM = 0xFFFFFFFF


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as files do: "bfloat16"."""
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
