"""Files of `torch.save` that somebody else has written, read as plain values and as tensors where they lie.

They are read by torch's unpickler of tensors and plain values, first without any tensor's memory. What it says of a
tensor is held against the file before the tensor is made: it lies in the file, and no element of the file is two of it.
A tensor is mapped, so it is in memory only while it is copied.
"""

import stat
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.fields import MOST_DIMENSIONS, MOST_NUMEL, Field
from penstock.errors import CheckpointError, one_line

#: The most bytes of a file that are not tensors: names and numbers.
MOST_PICKLE_BYTES = 1 << 26
_MOST_COUNT = 1 << 53


class PickledFile:
    """One file.

    Arguments:
        path: where the file is.
        stand_ins: classes that its pickle may name, beside those of tensors: what is made of each, and its name.

    Attributes:
        content: the whole value; its tensors have no memory, `tensor` gives them.
        nbytes: the size of the file.

    Raises:
        CheckpointError: it holds other objects than these, or is no file of `torch.save`.
    """

    def __init__(self, path: Path, stand_ins: Sequence[tuple[Any, str]]) -> None:
        try:
            self.nbytes = _check_archive(path)
            with torch.serialization.safe_globals(list(stand_ins)):
                value = torch.load(path, map_location="meta", mmap=True, weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # somebody else's file: whatever it makes of the reader
            # What torch met; its own message around that is advice which does not hold here.
            reason = one_line(str(error.__context__ or error).partition(" Please")[0].partition("\n")[0])
            raise refused(
                path, f"{path} is not read: {reason.rstrip('. ')}. Of pickles, only tensors and plain values are."
            ) from error
        self.content = Field(path, "", value)
        self._mapped: Any = torch.UntypedStorage.from_file(str(path), False, self.nbytes)

    def tensor(self, field: Field) -> Tensor:
        """Map a tensor of the content, as it lies in the file.

        Raises:
            CheckpointError: it is no tensor, does not lie there as a whole, or says that some elements are several.
        """
        value = field.value
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise field.fail("is not a tensor")
        storage = value.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)
        size = value.element_size()
        last = value.storage_offset() + sum(
            (extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True)
        )
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype)
        if not isinstance(offset, int) or not 0 <= offset <= offset + (last + 1) * size <= self.nbytes:
            raise field.fail(f"is a tensor of shape {_shown(value.shape)} that does not lie in the file")
        if value.numel() > last + 1 - value.storage_offset():
            raise field.fail(f"is a tensor of shape {_shown(value.shape)}, more elements than it has")
        begin, stop = offset + value.storage_offset() * size, offset + (last + 1) * size
        held = torch.empty(0, dtype=torch.uint8).set_(self._mapped, begin, (stop - begin,), (1,))
        return held.view(value.dtype).as_strided(value.shape, value.stride(), held.storage_offset() // size)

    def count(self, field: Field) -> int:
        """Read a whole number that may be a tensor.

        Raises:
            CheckpointError: it is no whole number, or is negative.
        """
        value = self.tensor(field).item() if isinstance(field.value, Tensor) else field.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_COUNT:
            raise field.fail("is not a count")
        if value != int(value):
            raise field.fail("is not a whole number")
        return int(value)

    def plain(self, field: Field) -> Any:
        """Copy a value with everything that is in it, tensors as they lie in the file.

        Raises:
            CheckpointError: it has more in it than the file has bytes: a pickle can say the same thing often.
        """
        left = self.nbytes

        def copy(inner: Field) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise field.fail("has more in it than the file has bytes")
            value = inner.value
            if isinstance(value, Tensor):
                found = self.tensor(inner)
                left -= found.numel() * found.element_size()
                return found
            if isinstance(value, Mapping):
                return {key: copy(Field(inner.file, str(key), item, inner)) for key, item in value.items()}
            if isinstance(value, list | tuple):
                items = [copy(Field(inner.file, number, item, inner)) for number, item in enumerate(value)]
                return items if isinstance(value, list) else tuple(items)
            return value

        try:
            return copy(field)
        except RecursionError:
            raise field.fail("is nested too deeply") from None


def refused(path: Path, message: str) -> CheckpointError:
    """Make the error that names a file."""
    return CheckpointError(message, file=str(path))


def shape(field: Field) -> tuple[int, ...]:
    """Read the extents of a tensor that lies elsewhere.

    Raises:
        CheckpointError: they are no extents, or larger than any tensor's.
    """
    value = field.value
    if not isinstance(value, tuple) or any(type(extent) is not int or extent < 0 for extent in value):
        raise field.fail("is not a shape")
    if len(value) > MOST_DIMENSIONS or prod(extent or 1 for extent in value) > MOST_NUMEL:
        raise field.fail("is larger than any tensor")
    return tuple(value)


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
        if not isinstance(key, str) or not key.isprintable():
            raise field.fail(f"has the key {one_line(repr(key), 80)}, which is not a name")
    return dict(field.entries())


def _check_archive(path: Path) -> int:
    """Hold what a file says of its parts against its size: nothing is compressed, and no part lies in another."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise refused(path, f"{path} is not a file.")
    if not zipfile.is_zipfile(path):
        raise refused(
            path,
            f"{path} is not read: it is not what torch.save has written since 1.6. Of pickles, only tensors and plain "
            "values are.",
        )
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED or part.flag_bits & 1 for part in parts):
        raise refused(path, f"{path} is compressed, which torch.save does not do.")
    if sum(part.file_size for part in parts) > status.st_size:
        raise refused(path, f"{path} says that it holds more than it has bytes.")
    if any(part.file_size > MOST_PICKLE_BYTES and part.filename.endswith(".pkl") for part in parts):
        raise refused(path, f"{path} holds more than {MOST_PICKLE_BYTES:,} bytes beside tensors.")
    return status.st_size


def _shown(extents: Sequence[int]) -> str:
    """Write a shape for a message, cut where it is long."""
    return one_line(str(tuple(extents)), 80)
