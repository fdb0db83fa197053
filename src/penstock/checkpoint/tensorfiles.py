"""Reading and writing parts of tensors in safetensors files: no whole tensor is in memory.

file    | bytes of the header, 8 | header: JSON, spaces to a multiple of 8 | tensor 0 | tensor 1 | ...
"""

import contextlib
import ctypes
import errno
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CheckpointError, one_line
from penstock.files import parse_object, read_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 1 << 28
_HEADER_GRAIN_BYTES = 8

#: The mode of every file of a checkpoint, before the umask, as of `torch.save`.
FILE_MODE = 0o666

#: Every dtype of tensors in files, by its name there.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Read


#: The shape and dtype of each tensor, by name.
Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class StoredTensors(ABC):
    """Tensors by name that are read in parts, from files or made of tensors in files."""

    @abstractmethod
    def forms(self) -> Forms:
        """Return shape and dtype of each tensor."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` of a tensor, counted as if it were flat: 1-D, on the cpu, in its dtype."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. A later read opens them again."""

    def origin(self, name: str) -> "tuple[WeightFiles, str] | None":
        """Return the files and the name of the stored tensor with the same bytes; `None` if there is none."""
        del name
        return None


@dataclass(frozen=True)
class Entry:
    """One tensor of the files."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(StoredTensors):
    """The tensors of a safetensors file, or of a folder of them as `save_pretrained` writes it.

    Arguments:
        path: a file, an index file (*.index.json), or a folder with an index, with model.safetensors, or with any
            .safetensors files.

    Raises:
        CheckpointError: a file is missing, is not safetensors, or lacks a tensor of the index.

    Attributes:
        read_bytes: bytes of tensors that were read so far.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.read_bytes = 0
        self._opened: dict[Path, Any] = {}
        self.entries: dict[str, Entry] = {}
        path = Path(path)
        index = path / INDEX if path.is_dir() else path
        named = _read_index(index) if index.suffix == ".json" and index.is_file() else None
        for file in _files(path) if named is None else dict.fromkeys(named.values()):
            for name, entry in _headers(file).items():
                if name in self.entries:
                    raise CheckpointError(f"{file} and {self.entries[name].file} both hold '{name}'. Keep one of them.")
                self.entries[name] = entry
        if missing := sorted((named or {}).keys() - self.entries.keys()):
            raise CheckpointError(f"{index}: 'weight_map' names {missing[0]!r}, which no file holds.")

    def forms(self) -> Forms:
        """Return shape and dtype of each tensor in the files."""
        return {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements `start` to `stop` of a tensor, counted as if it were flat: 1-D, on the cpu, in its dtype."""
        entry = self.entries[name]
        from safetensors import safe_open  # not at import: few users need it

        if entry.file not in self._opened:
            self._opened[entry.file] = safe_open(entry.file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
        opened = self._opened[entry.file]
        if not entry.shape:
            scalar: Tensor = opened.get_tensor(name)
            self.read_bytes += scalar.nbytes
            return scalar.reshape(1)[start:stop]
        row = max(1, prod(entry.shape[1:]))
        first = start // row
        rows: Tensor = opened.get_slice(name)[first : -(-stop // row)]
        self.read_bytes += rows.nbytes
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def origin(self, name: str) -> "tuple[WeightFiles, str]":
        """Name the tensor itself."""
        return self, name

    def close(self) -> None:
        """Close the files."""
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()


def _files(path: Path) -> Sequence[Path]:
    """Return the files of a folder that has no index, or the named file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder.")
    found = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{path} holds no .safetensors weights, the only format that is read.")
    return found


def _read_index(index: Path) -> dict[str, Path]:
    """Read the file of each tensor from an index. The files must exist beside it."""
    try:
        content = parse_object(read_bytes(index, _MOST_INDEX_BYTES), is_strict=False)
        named = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index: its 'weight_map' cannot be read ({one_line(error)}).") from error
    for file in dict.fromkeys(named.values()):
        if Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{index}: 'weight_map' names the file {file!r}, which does not lie beside it.")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index}: 'weight_map' names the file {file!r}, which is missing.")
    return {name: index.parent / file for name, file in named.items()}


def _headers(file: Path) -> dict[str, Entry]:
    """Read the header of a file."""
    from safetensors import safe_open

    entries = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found = opened.get_slice(name)
                dtype = DTYPES.get(found.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{file}: '{name}' is {found.get_dtype()}, which is not read.")
                entries[name] = Entry(file, tuple(found.get_shape()), dtype)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise anything in the library
        raise CheckpointError(f"{file} is no safetensors file: {one_line(error)}.", file=str(file)) from error
    return entries


def read_tensors(file: Path | str, text: bytes) -> dict[str, Tensor]:
    """Read the tensors of a small file from its bytes.

    Arguments:
        file: the file, for messages.
        text: its bytes.

    Raises:
        CheckpointError: they are no safetensors file.
    """
    import safetensors.torch

    try:
        return dict(safetensors.torch.load(text))
    except Exception as error:  # a damaged file may raise anything in the library
        raise CheckpointError(f"{file} is damaged: {one_line(error)}.", file=str(file)) from error


# Written


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a small file of tensors."""
    import safetensors.torch

    return bytes(safetensors.torch.save(dict(tensors)))


class TensorSpec(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def divide(tensors: Sequence[TensorSpec], stem: str, most_bytes: int) -> dict[str, list[TensorSpec]]:
    """Divide tensors among files, in order, named as `save_pretrained` names them.

    Arguments:
        tensors: the tensors to write.
        stem: the beginning of the names.
        most_bytes: the most bytes of a file. A larger tensor has one of its own.

    Example:
        >>> list(divide([TensorSpec("a", (4,), torch.float32), TensorSpec("b", (4,), torch.float32)], "model", 16))
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    files: list[list[TensorSpec]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = most_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    of_several = [f"-{number:05d}-of-{len(files):05d}" for number in range(1, len(files) + 1)]
    names = [f"{stem}{part}.safetensors" for part in (of_several if len(files) > 1 else [""])]
    return dict(zip(names, files or [[]], strict=True))


def index_of(files: Mapping[str, Sequence[TensorSpec]], about: Mapping[str, object] | None = None) -> str:
    """Write the index of several files, by their names. `about` is added to its metadata."""
    index: Mapping[str, object] = {
        "metadata": {
            **(about or {}),
            "total_size": sum(tensor.nbytes for tensors in files.values() for tensor in tensors),
        },
        "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


class TensorFile:
    """A new safetensors file, allocated in full.

    Arguments:
        path: its path, which must not exist.
        tensors: the tensors that it will hold.

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
        with _writing(path), contextlib.ExitStack() as undo:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            undo.callback(os.close, self._descriptor)
            os.posix_fallocate(self._descriptor, 0, self._start + cursor)  # a full disk is found before any work
            self._write(0, memoryview(len(text).to_bytes(8, "little") + text))
            undo.pop_all()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor.

        Arguments:
            name: the tensor's.
            start: the first element, counted as if it were flat.
            values: contiguous, on the cpu, in the tensor's dtype.

        Raises:
            CheckpointError: they cannot be written.
        """
        assert values.dtype == self._dtypes[name]
        assert values.is_contiguous()
        nbytes = values.numel() * values.element_size()
        memory = (ctypes.c_char * nbytes).from_address(values.data_ptr()) if nbytes else b""
        offset = self._start + self._offsets[name] + start * values.element_size()
        with _writing(self._path):
            self._write(offset, memoryview(memory).cast("B"))

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Flush the file to the disk.

        Raises:
            CheckpointError: that has failed.
        """
        with _writing(self._path):
            os.fsync(self._descriptor)  # an export is renamed into place once all of its files are on the disk

    def close(self) -> None:
        """Close the file. It stays."""
        with contextlib.suppress(OSError):  # `sync` has raised it
            os.close(self._descriptor)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file in errors of the system."""
    try:
        yield
    except OSError as error:
        raise failed(path, error) from error


def failed(path: Path, error: OSError) -> CheckpointError:
    """Return the error of an export's failed write, which names the file."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "Free space there, or export elsewhere." if full else "Export elsewhere."
    return CheckpointError(f"Writing {path} failed: {error.strerror or error}. {advice}", file=str(path))
