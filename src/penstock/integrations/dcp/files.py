"""A folder of `torch.distributed.checkpoint`: its index, and the items in its files.

    .metadata        a pickle: for each tensor its shape, its chunks and in which file they lie; and how keys are nested
    __0_0.distcp     items one after the other, each a whole file of torch.save: one chunk of a tensor, or a value

Both are read by `integrations.pickled`, which runs nothing. A chunk is mapped where it lies, so it is in memory only
while it is copied. What the index says is held against the files first: each item is read for one key alone, and all of
them together are no larger than the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, one_line
from penstock.files import read_bytes
from penstock.integrations.pickled import (
    DTYPE_NAMES,
    MOST_PICKLE_BYTES,
    TENSOR_NAMES,
    Archive,
    Made,
    PickleError,
    extents,
    made,
    map_file,
    not_read,
    read_value,
    refused,
)

INDEX = ".metadata"
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_IN_INDEX: Mapping[str, Any] = {
    **{f"{_META}.{name}": made(name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")},
    **{f"{_META}.{name}": made(name) for name in ("ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex")},
    **{f"{_META}.{name}": Made for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")},
    **{f"pathlib.{name}": Made for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")},
    **{f"pathlib._local.{name}": Made for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    f"{_FILES}._StorageInfo": made("_StorageInfo"),
    "torch.Size": extents,
    "torch.serialization._get_layout": Made,
    **DTYPE_NAMES,
}
_Keys = tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where an item lies: in which file, from which byte, in how many."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor's elements, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class DcpFolder:
    """One folder.

    Arguments:
        folder: it has the file `.metadata`.

    Attributes:
        tensors: by the keys that lead to them, such as `("model", "norm.weight")`.
        values: everything else, likewise.
        nbytes: the size of all files.

    Raises:
        CheckpointError: the index is damaged, or names what no index does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Tensor] = {}
        self.tensors: dict[_Keys, SavedTensor] = {}
        self.values: dict[_Keys, Place] = {}
        path = folder / INDEX
        self.nbytes = path.stat().st_size
        try:
            self._read_index(_fields(read_value(read_bytes(path, MOST_PICKLE_BYTES), _IN_INDEX), "Metadata"))
        except CheckpointError:
            raise
        except PickleError as error:
            raise not_read(path, str(error)) from error
        except Exception as error:  # another library's index: a value may be of any type
            raise not_read(path, one_line(error)) from error

    def _read_index(self, index: Mapping[str, Any]) -> None:
        """Read what there is, and map every file that the index names."""
        places = dict(_place(key, item) for key, item in index["storage_data"].items())
        for file in {place.file for place in places.values()}:
            if Path(file).name != file:
                raise refused(self.folder / file, f"{self.folder / file} is missing.")
            self._files[file] = map_file(self.folder / file)
            self.nbytes += self._files[file].numel()
        if sum(place.length for place in places.values()) > self.nbytes:
            raise PickleError("its items are more than its files have bytes")
        nested = index.get("planner_data")
        left = self.nbytes
        for name, item in index["state_dict_metadata"].items():
            keys = nested.get(name, (name,)) if isinstance(nested, dict) else (name,)
            if type(name) is not str or not name.isprintable() or type(keys) is not tuple:
                raise PickleError(f"{one_line(str(name), 80)!r} has keys that are no names")
            for key in keys:
                left -= len(key) + 1 if type(key) is str else 64
                if left < 0 or type(key) not in (str, int):
                    raise PickleError(f"'{one_line(name, 80)}' has keys that are no names, or more than its files are")
            # As text: Python's hash of a number is known, so that many can be made to collide.
            keys = tuple(map(str, keys))
            if type(item).__name__ == "BytesStorageMetadata":
                self.values[keys] = places.pop((name, None))
            else:
                self.tensors[keys] = _saved_tensor(name, _fields(item, "TensorStorageMetadata"), places)

    def value(self, place: Place) -> Any:
        """Read an item that is no tensor: numbers, strings, and lists, tuples and dicts of them; or small tensors.

        Raises:
            CheckpointError: it holds something else.
        """
        try:
            archive = self._item(place)
            return archive.plain(archive.value)
        except PickleError as error:
            raise self._fail(place, str(error)) from error

    def chunk(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Map a chunk of a tensor, as the bytes of its elements one after the other.

        Raises:
            CheckpointError: it does not lie in its file as a whole, or is not what the index says.
        """
        try:
            archive = self._item(chunk.place)
            elements, stored = archive.elements(archive.value), archive.value
        except PickleError as error:
            raise self._fail(chunk.place, str(error)) from error
        found, numel = stored.dtype, prod(stored.shape)
        if found != dtype or numel != prod(chunk.sizes):
            raise self._fail(chunk.place, f"it is {found} of {numel:,} elements, which is not what the index says")
        inner = [(extent, stride) for extent, stride in zip(stored.shape, stored.strides, strict=True) if extent > 1]
        if any(stride != prod(extent for extent, _ in inner[n + 1 :]) for n, (_, stride) in enumerate(inner)):
            raise self._fail(chunk.place, "its elements do not lie one after the other")
        return elements

    def _item(self, place: Place) -> Archive:
        """Read an item's pickle."""
        mapped = self._files[place.file]
        if place.offset + place.length > mapped.numel():
            raise PickleError("it does not lie in its file")
        return Archive(mapped[place.offset : place.offset + place.length], TENSOR_NAMES)

    def _fail(self, place: Place, why: str) -> CheckpointError:
        path = self.folder / place.file
        return not_read(path, f"at byte {place.offset:,} {why}")


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Give the fields of an object of a class."""
    if type(value).__name__ != name or type(value.state) is not dict:
        raise PickleError(f"it has no {name} where one belongs")
    fields: Mapping[str, Any] = value.state
    return fields


def _place(key: Any, item: Any) -> tuple[tuple[str, tuple[int, ...] | None], Place]:
    """Read where an item lies, and what it is of."""
    index, info = _fields(key, "MetadataIndex"), _fields(item, "_StorageInfo")
    if info.get("transform_descriptors"):
        raise PickleError("its items are compressed or encrypted, which is not read")
    name, file, offset, length = index["fqn"], info["relative_path"], info["offset"], info["length"]
    if [type(name), type(file), type(offset), type(length)] != [str, str, int, int] or offset < 0 or length < 0:
        raise PickleError("it has an item without a place")
    offsets = index.get("offset")
    return (name, None if offsets is None else extents(offsets)), Place(file, offset, length)


def _saved_tensor(name: str, fields: Mapping[str, Any], places: dict[Any, Place]) -> SavedTensor:
    """Read a tensor, and take the places of its chunks, which have to be the whole tensor."""
    shape, dtype = extents(fields["size"]), fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"'{name}' has no dtype")
    chunks = []
    for chunk in (_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]):
        offsets, sizes = extents(chunk["offsets"]), extents(chunk["sizes"])
        if (name, offsets) not in places:
            raise PickleError(f"'{name}' has a chunk that lies nowhere, or one twice")
        chunks.append(Chunk(offsets, sizes, places.pop((name, offsets))))
        if not len(offsets) == len(sizes) == len(shape):
            raise PickleError(f"'{name}' has a chunk of other dimensions")
        if any(offset + size > extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)):
            raise PickleError(f"'{name}' has a chunk beyond its shape")
        if prod(sizes) * dtype.itemsize > chunks[-1].place.length:
            raise PickleError(f"'{name}' has a chunk that is larger than its item, which does not lie in its file")
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        raise PickleError(f"'{name}' is not whole: its chunks are not its {prod(shape):,} elements")
    return SavedTensor(shape, dtype, tuple(chunks))
