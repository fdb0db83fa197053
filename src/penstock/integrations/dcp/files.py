"""A folder of `torch.distributed.checkpoint`: its index, and the items in its files.

    .metadata        a pickle: for each tensor its shape, its chunks and in which file they lie; and how keys are nested
    __0_0.distcp     items one after the other, each a whole file of torch.save: one chunk of a tensor, or a value

Both are read by `integrations.dcp.opcodes`, which runs nothing. A chunk is mapped where it lies, so it is in memory
only while it is copied; what the index says of it is held against the file first.
"""

import io
import stat
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.boundedfiles import read_bytes
from penstock.checkpoint.fields import MOST_DIMENSIONS, MOST_NUMEL
from penstock.checkpoint.tensorfiles import DTYPES
from penstock.errors import CheckpointError, one_line
from penstock.integrations.dcp.opcodes import Made, PickleError, read_values
from penstock.integrations.pickled import MOST_PICKLE_BYTES, refused

INDEX = ".metadata"
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
_REBUILT = "torch._utils._rebuild_tensor_v2"
_IN_INDEX = frozenset(
    {f"{_META}.{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")}
    | {f"{_META}.{name}" for name in ("ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta")}
    | {f"{_FILES}._StorageInfo", "torch.Size", "torch.serialization._get_layout", *_DTYPES}
    | {f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")}
)
_IN_ITEMS = frozenset({_REBUILT, "collections.OrderedDict", "torch.Size", "torch.device", *_STORAGES, *_DTYPES})
_LOCAL_HEADER = 30
_MOST_DEPTH = 64


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
        self._files: dict[str, Any] = {}
        self.tensors: dict[tuple[Any, ...], SavedTensor] = {}
        self.values: dict[tuple[Any, ...], Place] = {}
        path = folder / INDEX
        try:
            raw = read_bytes(path, MOST_PICKLE_BYTES)
            self._read_index(_fields(read_values(raw, _IN_INDEX), f"{_META}.Metadata"))
        except CheckpointError:
            raise
        except Exception as error:  # somebody else's file
            raise refused(path, f"{path} is not read: {one_line(error)}.") from error
        self.nbytes = sum(storage.nbytes() for storage in self._files.values()) + len(raw)

    def _read_index(self, index: Mapping[str, Any]) -> None:
        """Read what there is, and map every file that the index names."""
        places = dict(_place(key, item) for key, item in index["storage_data"].items())
        nested = index.get("planner_data")
        for name, item in index["state_dict_metadata"].items():
            keys = nested.get(name, (name,)) if isinstance(nested, dict) else (name,)
            if not isinstance(keys, tuple) or any(type(key) not in (str, int) for key in keys):
                raise PickleError(f"{one_line(str(name), 80)!r} has keys that are no names")
            if item.name == f"{_META}.BytesStorageMetadata":
                self.values[keys] = places[name, None]
                continue
            fields = _fields(item, f"{_META}.TensorStorageMetadata")
            chunks = tuple(
                Chunk(offsets, sizes, places[name, offsets])
                for chunk in fields["chunks"]
                for offsets, sizes in [(_shape(chunk.state["offsets"]), _shape(chunk.state["sizes"]))]
            )
            self.tensors[keys] = SavedTensor(
                _shape(fields["size"]), _DTYPES[fields["properties"].state[0].name], chunks
            )
            _check_chunks(name, self.tensors[keys])
        for place in {place.file: place for place in places.values()}.values():
            self._files[place.file] = self._map(place.file)

    def value(self, place: Place) -> Any:
        """Read an item that is no tensor: numbers, strings, and lists, tuples and dicts of them; or small tensors.

        Raises:
            CheckpointError: it holds something else.
        """
        content, storages = self._item(place)
        left = place.length

        def copy(value: Any, depth: int) -> Any:
            nonlocal left
            left -= 1
            if left < 0 or depth > _MOST_DEPTH:
                raise self._fail(place, "it has more in it than it has bytes, or is nested too deeply")
            if value is None or type(value) in (bool, int, float, str, bytes):
                return value
            if type(value) is Made and value.name == _REBUILT:
                mapped, dtype, shape = self._mapped(value, storages, place)
                left -= mapped.numel()
                return mapped.clone().view(dtype).view(shape)
            if type(value) is Made and value.name == "collections.OrderedDict":
                items = value.state or []
                value = dict(zip(items[::2], items[1::2], strict=True))
            if type(value) is dict:
                return {key: copy(item, depth + 1) for key, item in value.items()}
            if type(value) in (list, tuple):
                return type(value)(copy(item, depth + 1) for item in value)
            what = one_line(str(getattr(value, "name", type(value).__name__)), 80)
            raise self._fail(place, f"it holds {what}, which is no plain value")

        return copy(content, 0)

    def chunk(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Map a chunk of a tensor, as the bytes of its elements one after the other.

        Raises:
            CheckpointError: it does not lie in its file as a whole, or is not what the index says.
        """
        content, storages = self._item(chunk.place)
        mapped, found, shape = self._mapped(content, storages, chunk.place)
        if found != dtype or prod(shape) != prod(chunk.sizes):
            raise self._fail(
                chunk.place, f"it is {found} of {prod(shape):,} elements, which is not what the index says"
            )
        return mapped

    def _mapped(self, content: Any, storages: Mapping[str, tuple[int, int]], place: Place) -> tuple[Tensor, Any, Any]:
        """Map a tensor's bytes; returns them, its dtype and its shape."""
        try:
            if type(content) is not Made or content.name != _REBUILT:
                raise PickleError("it is no tensor")
            (_, named, key, _, _), first, extents, strides, *_ = (content.arguments[0].key, *content.arguments[1:])
            dtype, shape = _STORAGES[named.name], _extents(extents)
            begin, nbytes = storages[key]
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise self._fail(place, f"it is no tensor that is read ({one_line(error)})") from error
        size, numel = dtype.itemsize, prod(shape)
        if numel > 1 and list(strides) != [prod(shape[number + 1 :]) for number in range(len(shape))]:
            wrong = [stride for extent, stride in zip(shape, strides, strict=False) if extent > 1]
            right = [prod(shape[number + 1 :]) for number, extent in enumerate(shape) if extent > 1]
            if wrong != right:
                raise self._fail(place, "its elements do not lie one after the other")
        if type(first) is not int or not 0 <= first * size <= (first + numel) * size <= nbytes:
            raise self._fail(place, f"its {numel:,} elements do not lie in its storage of {nbytes:,} bytes")
        mapped = torch.empty(0, dtype=torch.uint8).set_(
            self._files[place.file], begin + first * size, (numel * size,), (1,)
        )
        return mapped, dtype, shape

    def _item(self, place: Place) -> tuple[Any, Mapping[str, tuple[int, int]]]:
        """Read an item's pickle; and find its storages: for each where it begins in the file, and its bytes."""
        storage = self._files[place.file]
        if not 0 <= place.offset <= place.offset + place.length <= storage.nbytes():
            raise self._fail(place, "it does not lie in its file")
        window = torch.empty(0, dtype=torch.uint8).set_(storage, place.offset, (place.length,), (1,))
        try:
            with zipfile.ZipFile(_Window(window)) as archive:
                parts = {part.filename.partition("/")[2]: part for part in archive.infolist()}
                if any(part.compress_type != zipfile.ZIP_STORED or part.flag_bits & 1 for part in parts.values()):
                    raise PickleError("it is compressed, which torch.save does not do")
                if parts["data.pkl"].file_size > min(MOST_PICKLE_BYTES, place.length):
                    raise PickleError("it is no tensor and no small value")
                if "byteorder" in parts and archive.read(parts["byteorder"]) != b"little":
                    raise PickleError("it was saved on a machine of the other byte order")
                content = read_values(archive.read(parts["data.pkl"]), _IN_ITEMS)
                storages = {
                    name.removeprefix("data/"): (place.offset + _begin(window, part.header_offset), part.file_size)
                    for name, part in parts.items()
                    if name.startswith("data/")
                }
        except Exception as error:  # somebody else's file
            raise self._fail(place, one_line(error)) from error
        return content, storages

    def _map(self, name: str) -> Any:
        """Map a file of the folder."""
        path = self.folder / name
        if Path(name).name != name or not path.is_file() or not stat.S_ISREG(path.stat().st_mode):
            raise refused(path, f"{path} is missing.")
        return torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)

    def _fail(self, place: Place, why: str) -> CheckpointError:
        path = self.folder / place.file
        return refused(path, f"{path} is not read at byte {place.offset:,}: {why}.")


class _Window(io.RawIOBase):
    """Bytes that are mapped, as a file."""

    def __init__(self, window: Tensor) -> None:
        self._window = window
        self._at = 0

    def readable(self) -> bool:
        """Whether one can read."""
        return True

    def seekable(self) -> bool:
        """Whether one can go elsewhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._window.numel()}[whence]
        self._at = max(0, base + offset)
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


def _begin(window: Tensor, header: int) -> int:
    """Find where a part's bytes begin behind its header."""
    lengths = bytes(window[header + 26 : header + _LOCAL_HEADER].tolist())
    name, extra = struct.unpack("<HH", lengths)
    return header + _LOCAL_HEADER + int(name) + int(extra)


def _fields(made: Any, name: str) -> Mapping[str, Any]:
    """Give the fields of an object of a class."""
    if type(made) is not Made or made.name != name or type(made.state) is not dict:
        raise PickleError(f"it has no {name.rpartition('.')[2]} where one belongs")
    return made.state


def _place(key: Any, item: Any) -> tuple[tuple[str, tuple[int, ...] | None], Place]:
    """Read where an item lies, and what it is of."""
    index, info = _fields(key, f"{_META}.MetadataIndex"), _fields(item, f"{_FILES}._StorageInfo")
    if info.get("transform_descriptors"):
        raise PickleError("its items are compressed or encrypted, which is not read")
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if type(file) is not str or type(offset) is not int or type(length) is not int or type(index["fqn"]) is not str:
        raise PickleError("it has an item without a place")
    offsets = index.get("offset")
    return (index["fqn"], None if offsets is None else _shape(offsets)), Place(file, offset, length)


def _shape(value: Any) -> tuple[int, ...]:
    """Read a `torch.Size`."""
    if type(value) is not Made or value.name != "torch.Size" or len(value.arguments) > 1:
        raise PickleError("it has no shape where one belongs")
    return _extents(value.arguments[0] if value.arguments else ())


def _extents(value: Any) -> tuple[int, ...]:
    if type(value) is Made:
        return _shape(value)
    if type(value) is not tuple or any(type(extent) is not int or extent < 0 for extent in value):
        raise PickleError("it has no shape where one belongs")
    if len(value) > MOST_DIMENSIONS or prod(extent or 1 for extent in value) > MOST_NUMEL:
        raise PickleError("it has a shape that is larger than any tensor")
    return value


def _check_chunks(name: Any, tensor: SavedTensor) -> None:
    """Refuse chunks that are not the whole tensor."""
    if not isinstance(name, str) or not name.isprintable():
        raise PickleError("it has a tensor without a name")
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
            raise PickleError(f"'{name}' has a chunk of other dimensions")
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > extent for end, extent in zip(ends, tensor.shape, strict=True)):
            raise PickleError(f"'{name}' has a chunk beyond its shape")
    if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
        raise PickleError(f"'{name}' is not whole: its chunks are not its {prod(tensor.shape):,} elements")
