"""Checkpoints of `torch.distributed.checkpoint` (FSDP2, FSDP, torchtitan, accelerate), made into ones of Penstock.

    .metadata        a pickle: for each tensor its shape, its chunks and in which file they lie; and how keys are nested
    __0_0.distcp     items one after the other, each a whole file of torch.save: one chunk of a tensor, or a value

The restricted unpickler (`ext.interop.pickled`) reads both. The index is compared with the files first: each item is
read for one key alone, and all of them together are no larger than the files. Keys differ a little:

    plain         {"model": ..., "optim": ...} of `get_state_dict`, also inside {"app": ...}
    torchtitan    the model's tensors at the top, "optimizer" with flat keys: state.NAME.exp_avg, param_groups.NAME.lr
    accelerate    folders pytorch_model_fsdp_0 and optimizer_0

They do not say which tensors of a model are its buffers: see `import_checkpoint`.
"""

import contextlib
import fnmatch
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.tables import BoxExtent, meet
from penstock.errors import CheckpointError, one_line
from penstock.ext.interop.importing import Incoming, Read, write_checkpoint
from penstock.ext.interop.pickled import (
    DTYPE_NAMES,
    MOST_PICKLE_BYTES,
    OPTIONS,
    TENSOR_NAMES,
    Archive,
    PickleError,
    extents,
    inert,
    map_file,
    most_bytes,
    not_read,
    read_value,
    reading,
    refused,
)
from penstock.files import read_bytes

_INDEX = ".metadata"
_MODELS = ("model", "state_dict", "module")
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_0", "optimizer_state_dict")
_OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
#: What buffers are called that torch's own modules have, and models of transformers.
_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked", "*inv_freq", "*position_ids")
_TILE_NUMEL = 1 << 20
_MOST_EXTRA_BYTES = 1 << 26
_MOST_STATES = 16
_MOST_STEP = 1 << 53

_META = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
_IN_INDEX: Mapping[str, Any] = {
    **inert(_META, "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    **inert(_META, "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    **inert("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **inert("pathlib", *_PATHS),
    **inert("pathlib._local", *_PATHS),
    **inert("torch.serialization", "_get_layout"),
    "torch.Size": extents,
    **DTYPE_NAMES,
}
_Keys = tuple[str, ...]


def import_checkpoint(folder: str | PathLike[str], out: str | PathLike[str], *, buffers: Iterable[str] = ()) -> None:
    """Make a checkpoint that `Optimizer.load` reads of one that `torch.distributed.checkpoint` has saved.

    Master weights, states of the optimizer, step counts, options of param groups, frozen parameters and buffers. Load
    it at any world size, stage and placement, into the same model with param groups of the same trained parameters.
    `extra` holds everything else that is made of plain values and small tensors, nested as it was; a warning names what
    is not.

    What the optimizer does not have is a frozen parameter, a buffer, or a tied parameter's other name. It is the last
    if it has a trained one's values, and a buffer if it is no floating-point tensor, is called as buffers of torch are,
    or lies in one piece where parameters are sharded; and else frozen.

    Arguments:
        folder: has the file `.metadata`, or accelerate's `pytorch_model_fsdp_0` and `optimizer_0`.
        out: the checkpoint's folder; it must not exist, or be empty.
        buffers: names of further buffers, in which `*` stands for anything.

    Raises:
        ConfigError: `out` has something in it.
        CheckpointError: a file is missing or damaged, names classes that it need not, has no state of an optimizer, or
            one that is not by the parameters' names.

    Example:
        >>> import_checkpoint("checkpoints/step-1000", "checkpoints/from-fsdp")  # doctest: +SKIP
    """
    folder = Path(folder)
    with reading(folder):
        saved = _Saved(folder)
        frozen, of_buffers = saved.divide((*_BUFFERS, *buffers))
        write_checkpoint(
            Path(out),
            [*saved.trained(), *frozen],
            rule="torch's optimizer",
            groups=saved.groups,
            buffers=of_buffers,
            extra=saved.extra(),
            most_bytes=most_bytes(saved.nbytes),
        )


# Items of a folder


@dataclass(frozen=True)
class _Item:
    """A part of a file: one that `torch.save` has written."""

    path: Path
    mapped: Tensor
    offset: int
    length: int

    @contextlib.contextmanager
    def archive(self) -> Iterator[Archive]:
        """Read the pickle. Errors inside name the file and the place."""
        try:
            if self.offset + self.length > self.mapped.numel():
                raise PickleError("it does not lie in its file")
            yield Archive(self.mapped[self.offset :][: self.length], TENSOR_NAMES)
        except PickleError as error:
            raise not_read(self.path, f"at byte {self.offset:,} {error}") from error

    def value(self) -> Any:
        """Read numbers, strings, small tensors, and lists, tuples and dicts of them."""
        with self.archive() as archive:
            return archive.plain(archive.value)


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor's elements."""

    box: BoxExtent
    dtype: torch.dtype
    item: _Item

    @cached_property
    def elements(self) -> Tensor:
        """The elements, as bytes that are mapped."""
        with self.item.archive() as archive:
            elements, stored = archive.elements(archive.value), archive.value
            numel = prod(stored.shape)
            if stored.dtype != self.dtype or numel != self.box.numel:
                raise PickleError(f"it is {stored.dtype} of {numel:,} elements, which is not what the index says")
            inner = [
                (extent, stride) for extent, stride in zip(stored.shape, stored.strides, strict=True) if extent > 1
            ]
            if any(stride != prod(extent for extent, _ in inner[n + 1 :]) for n, (_, stride) in enumerate(inner)):
                raise PickleError("its elements do not lie one after the other")
            return elements


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor of the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Copy elements `start` to `stop`, counted as if the tensor were flat.

        Raises:
            CheckpointError: the chunks do not have them all.
        """
        size, found = self.dtype.itemsize, 0
        copied = torch.empty((stop - start) * size, dtype=torch.uint8)
        for chunk in self.chunks:
            for inside, end, first in meet(BoxExtent.whole(self.shape), start, stop, chunk.box):
                values = chunk.elements[inside * size : end * size]
                copied[(first - start) * size :][: values.numel()] = values
                found += end - inside
        if found != stop - start:
            raise CheckpointError(f"The chunks of a tensor have {found:,} of its elements {start:,} to {stop:,}.")
        return copied.view(self.dtype)


def _read_folder(folder: Path) -> tuple[dict[_Keys, _SavedTensor | _Item], int]:
    """Read the index of a folder: each item by the keys that lead to it, and the size of all files."""
    path = folder / _INDEX
    try:
        index = _fields(read_value(read_bytes(path, MOST_PICKLE_BYTES), _IN_INDEX), "Metadata")
        files: dict[str, Tensor] = {}
        items = dict(_place(folder, files, key, info) for key, info in index["storage_data"].items())
        nbytes = path.stat().st_size + sum(file.numel() for file in files.values())
        if sum(item.length for item in items.values()) > nbytes:
            raise PickleError("its items are more than its files have bytes")
        found: dict[_Keys, _SavedTensor | _Item] = {}
        left = nbytes
        for name, fields in index["state_dict_metadata"].items():
            keys = (index.get("planner_data") or {}).get(name, (name,))
            for key in keys:
                left -= len(key) + 1 if type(key) is str else 64
                if left < 0 or type(key) not in (str, int) or not str(name).isprintable():
                    raise PickleError(
                        f"'{one_line(str(name), 80)}' has keys that are no names, or more than its files are"
                    )
            # As text: Python's hash of a number is known, so that many can be made to collide.
            is_value = fields.name == "BytesStorageMetadata"
            found[tuple(map(str, keys))] = items.pop((name, None)) if is_value else _saved_tensor(name, fields, items)
        return found, nbytes
    except PickleError as error:
        raise not_read(path, str(error)) from error


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of an object of a class."""
    if value.name != name or type(value.state) is not dict:
        raise PickleError(f"it has no {name} where one belongs")
    fields: Mapping[str, Any] = value.state
    return fields


def _place(
    folder: Path, files: dict[str, Tensor], key: Any, info: Any
) -> tuple[tuple[str, tuple[int, ...] | None], _Item]:
    """Read where an item lies, and what it is of; map its file."""
    index, place = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
    if place.get("transform_descriptors"):
        raise PickleError("its items are compressed or encrypted, which is not read")
    name, file, offset, length = index["fqn"], place["relative_path"], place["offset"], place["length"]
    if [type(name), type(file), type(offset), type(length)] != [str, str, int, int] or offset < 0 or length < 0:
        raise PickleError("it has an item without a place")
    if Path(file).name != file:
        raise refused(folder / file, f"{folder / file} is missing.")
    if file not in files:
        files[file] = map_file(folder / file)
    offsets = index.get("offset")
    return (name, None if offsets is None else extents(offsets)), _Item(folder / file, files[file], offset, length)


def _saved_tensor(name: str, value: Any, items: dict[Any, _Item]) -> _SavedTensor:
    """Read a tensor, and take the items of its chunks, which have to be the whole tensor."""
    fields = _fields(value, "TensorStorageMetadata")
    shape, dtype = extents(fields["size"]), fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise PickleError(f"'{name}' has no dtype")
    chunks = []
    for chunk in (_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]):
        box = BoxExtent(shape, extents(chunk["offsets"]), extents(chunk["sizes"]))
        if (name, box.offsets) not in items:
            raise PickleError(f"'{name}' has a chunk that lies nowhere, or one twice")
        if not len(box.offsets) == len(box.sizes) == len(shape):
            raise PickleError(f"'{name}' has a chunk of other dimensions")
        if any(offset + size > extent for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)):
            raise PickleError(f"'{name}' has a chunk beyond its shape")
        chunks.append(_Chunk(box, dtype, items.pop((name, box.offsets))))
        if box.numel * dtype.itemsize > chunks[-1].item.length:
            raise PickleError(f"'{name}' has a chunk that is larger than its item")
    if sum(chunk.box.numel for chunk in chunks) != prod(shape):
        raise PickleError(f"'{name}' is not whole: its chunks are not its {prod(shape):,} elements")
    return _SavedTensor(shape, dtype, tuple(chunks))


# What the items are of


class _Saved:
    """One checkpoint.

    Attributes:
        nbytes: the size of all files.
        groups: for each param group the names of its parameters, and its options.

    Raises:
        CheckpointError: as `import_checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nbytes = 0
        self._model: dict[str, _SavedTensor] = {}
        self._states: dict[str, dict[str, _SavedTensor | _Item]] = {}
        self._options: dict[str | int, dict[str, Any]] = {}
        self._others: dict[_Keys, _SavedTensor | _Item] = {}
        for path in _folders(folder):
            items, nbytes = _read_folder(path)
            self.nbytes += nbytes
            self._sort(items)
        self.groups = list(self._read_groups())
        self._trained = [name for names, _ in self.groups for name in names]
        for name in self._trained:
            if name not in self._model:
                raise self._fail(f"has nothing of the parameter '{one_line(name, 200)}', which its optimizer has")

    def trained(self) -> Iterator[Incoming]:
        """List the parameters that the optimizer has."""
        states = sorted({state for states in self._states.values() for state in states if state != "step"})
        if len(states) > _MOST_STATES:
            raise self._fail(f"has an optimizer of {len(states):,} states of each parameter, which no optimizer has")
        for name in self._trained:
            saved = self._model[name]
            reads = {state: self._state(name, state, saved.shape) for state in states}
            yield Incoming(name, saved.shape, torch.float32, self._step(name), saved.read, reads)

    def divide(self, patterns: Iterable[str]) -> tuple[list[Incoming], dict[str, Tensor]]:
        """Divide what the optimizer does not have into frozen parameters and buffers."""
        trained = [self._model[name] for name in self._trained]
        is_sharded = any(len(saved.chunks) > 1 for saved in trained)
        others = {name: saved for name, saved in self._model.items() if name not in set(self._trained)}
        buffers, frozen = {}, {}
        for name, saved in others.items():
            is_whole = is_sharded and len(saved.chunks) == 1 and bool(saved.shape) and saved.shape[0] > 1
            is_named = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            if not saved.dtype.is_floating_point or is_whole or is_named:
                buffers[name] = saved.read(0, prod(saved.shape)).view(saved.shape)
            else:
                frozen[name] = saved
        forms = {(saved.shape, saved.dtype) for saved in frozen.values()}
        known = {_digest(saved) for saved in trained if (saved.shape, saved.dtype) in forms} - {None}
        return [
            Incoming(name, saved.shape, saved.dtype, 0, saved.read, {})
            for name, saved in frozen.items()
            if not known or _digest(saved) not in known
        ], buffers

    def extra(self) -> dict[str, Any]:
        """Read what is neither the model's nor the optimizer's."""
        found: dict[str, Any] = {}
        left, skipped = _MOST_EXTRA_BYTES, []
        for keys, item in self._others.items():
            place = found
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            left -= prod(item.shape) * item.dtype.itemsize if isinstance(item, _SavedTensor) else 0
            try:
                if isinstance(item, _Item):
                    place[keys[-1]] = item.value()
                elif left >= 0:
                    place[keys[-1]] = item.read(0, prod(item.shape)).view(item.shape)
                else:
                    skipped.append(".".join(keys))
            except CheckpointError:
                skipped.append(".".join(keys))
        if skipped:
            warnings.warn(f"Not taken over, no plain values: {one_line(', '.join(skipped), 500)}.", stacklevel=3)
        return found

    def _sort(self, items: Mapping[_Keys, _SavedTensor | _Item]) -> None:
        """Find out what each key of a folder is of."""
        first = {keys[0] for keys in items}
        if len(first) == 1 and not first & {*_MODELS, *_OPTIMIZERS}:  # everything is in one thing, as in {"app": ...}
            items = {keys[1:]: item for keys, item in items.items() if len(keys) > 1}
        has_model = any(keys[0] in _MODELS and len(keys) > 1 for keys in items)
        for keys, item in items.items():
            if keys[0] in _OPTIMIZERS and len(keys) > 1:
                self._sort_state(keys[1:], item)
            elif isinstance(item, _SavedTensor) and (keys[0] in _MODELS if has_model else len(keys) == 1):
                name = ".".join(keys[1:] if has_model else keys)
                if name in self._model:
                    raise self._fail(f"has '{one_line(name, 200)}' twice")
                self._model[name] = item
            else:
                self._others[keys] = item

    def _sort_state(self, keys: _Keys, item: _SavedTensor | _Item) -> None:
        """Find out what a key of the optimizer is, of its nested form or of its flat one."""
        whole = ".".join(keys)
        kind, _, rest = whole.partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            self._states.setdefault(name, {})[last] = item
        elif kind == "param_groups" and name:
            group = int(keys[1]) if len(keys) == 3 and keys[1].isdecimal() else name
            self._options.setdefault(group, {})[last] = self._value(item)
        else:
            raise self._fail(f"has '{one_line(whole, 200)}' in its optimizer, which belongs to none of torch")

    def _value(self, item: _SavedTensor | _Item) -> Any:
        """Read a value; a tensor of one element as its number."""
        if isinstance(item, _SavedTensor) and prod(item.shape) != 1:
            raise self._fail("has a tensor where a number belongs")
        value = item.value() if isinstance(item, _Item) else item.read(0, 1)
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def _read_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Read the param groups: by number, or put together again of parameters that have the same options."""
        if not self._options:
            raise self._fail(
                "has no state of an optimizer. Weights alone are read by prepare(weights=), once they are safetensors"
            )
        together: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for group, options in self._options.items():
            kept = {name: value for name, value in options.items() if name in OPTIONS}
            if isinstance(group, str):
                together.setdefault(repr(sorted(options.items())), ([], kept))[0].append(group)
                continue
            names = options.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._fail("has an optimizer that numbers parameters. Save what get_state_dict() gives")
            yield names, kept
        yield from together.values()

    def _state(self, name: str, state: str, shape: tuple[int, ...]) -> Read:
        """Make the function that reads a state; zeros of a parameter that has none yet."""
        item = self._states.get(name, {}).get(state)
        if item is None:
            return lambda start, stop: torch.zeros(stop - start)
        if not isinstance(item, _SavedTensor) or item.shape != shape:
            raise self._fail(f"has a state '{one_line(state, 80)}' of '{one_line(name, 200)}' that is not of its shape")
        return item.read

    def _step(self, name: str) -> int:
        """Read how often a parameter was updated."""
        states = self._states.get(name, {})
        if "step" not in states:
            return 1 if states else 0  # SGD counts nothing, and has a momentum after its first step
        value = self._value(states["step"])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_STEP:
            raise self._fail(f"has a step of '{one_line(name, 200)}' that is no count")
        return int(value)

    def _fail(self, why: str) -> CheckpointError:
        return refused(self._folder, f"{self._folder} {why}.")


def _digest(saved: _SavedTensor) -> bytes | None:
    """Hash a tensor's shape, dtype and elements. None for elements that are all the same, or fewer than two."""
    numel = prod(saved.shape)
    digest, differ = hashlib.blake2b(repr((saved.shape, saved.dtype)).encode()), False
    for start in range(0, numel, _TILE_NUMEL):
        values = saved.read(start, min(start + _TILE_NUMEL, numel))
        differ |= bool((values != saved.read(0, 1)).any())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.digest() if differ else None


def _folders(folder: Path) -> list[Path]:
    """Find the folders that have an index."""
    if (folder / _INDEX).is_file():
        return [folder]
    of_accelerate = [folder / name for name in _OF_ACCELERATE]
    if all((each / _INDEX).is_file() for each in of_accelerate):
        return of_accelerate
    raise refused(
        folder,
        f"{folder} is no checkpoint of torch.distributed.checkpoint: it has neither {_INDEX} nor the folders "
        f"{' and '.join(_OF_ACCELERATE)}.",
    )
