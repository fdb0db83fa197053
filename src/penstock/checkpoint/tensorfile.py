"""Safetensors files that are written in pieces, in any order: no tensor is in memory as a whole.

file    | bytes of the header, 8 | header: JSON, spaces to a multiple of 8 | tensor 0 | tensor 1 | ...
"""

import contextlib
import ctypes
import errno
import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.weights import DTYPES
from penstock.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_GRAIN_BYTES = 8


class TensorSpec(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def divide(tensors: Iterable[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """Divide tensors among files, in order. A tensor larger than `most_bytes` has a file of its own."""
    files: list[list[TensorSpec]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files


class TensorFile:
    """A new safetensors file, allocated in full.

    Arguments:
        path: must not exist.
        tensors: what it will hold.

    Raises:
        CheckpointError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        cursor = 0
        # Wide elements first: each tensor then begins at a multiple of its element's size.
        for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
            self._offsets[tensor.name] = cursor
            header[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [cursor, cursor + tensor.nbytes],
            }
            cursor += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_GRAIN_BYTES)
        self._start = 8 + len(text)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(self._descriptor, 0, self._start + cursor)  # no room is known before the work
                self._write(0, memoryview(len(text).to_bytes(8, "little") + text))
            except OSError:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise failed(path, error) from error

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor.

        Arguments:
            name: of the tensor.
            start: the first element, counted as if it were flat.
            values: contiguous, on the cpu, in the tensor's dtype.

        Raises:
            CheckpointError: they cannot be written.
        """
        assert values.dtype == self._dtypes[name]
        assert values.is_contiguous()
        nbytes = values.numel() * values.element_size()
        memory = (ctypes.c_char * nbytes).from_address(values.data_ptr()) if nbytes else b""
        try:
            offset = self._start + self._offsets[name] + start * values.element_size()
            self._write(offset, memoryview(memory).cast("B"))
        except OSError as error:
            raise failed(self._path, error) from error

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Have everything that was written on the disk.

        Raises:
            CheckpointError: some of it is not.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise failed(self._path, error) from error

    def close(self) -> None:
        """Close the file. It stays."""
        with contextlib.suppress(OSError):  # `sync` has said it
            os.close(self._descriptor)


def failed(path: Path, error: OSError) -> CheckpointError:
    """The error that names the file."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "Free space there, or export elsewhere." if full else "Export elsewhere."
    return CheckpointError(f"Writing {path} failed: {error.strerror or error}. {advice}", file=str(path))
