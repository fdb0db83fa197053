"""Checkpoints of `torch.distributed.checkpoint` (FSDP2, FSDP, torchtitan, accelerate), made into ones of Penstock.

What lies where in their files: `integrations.dcp.files`. What they call it differs a little:

    plain         {"model": ..., "optim": ...} of `get_state_dict`, also inside {"app": ...}
    torchtitan    the model's tensors at the top, "optimizer" with flat keys: state.NAME.exp_avg, param_groups.NAME.lr
    accelerate    folders pytorch_model_fsdp_0 and optimizer_0

They do not say which tensors of a model are its buffers: see `import_checkpoint`.
"""

import fnmatch
import functools
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, one_line
from penstock.integrations.dcp.boxes import Box, read_boxes
from penstock.integrations.dcp.files import INDEX, DcpFolder, SavedTensor
from penstock.integrations.engine_internals import Incoming, Read, write_checkpoint
from penstock.integrations.foreign import OPTIONS, most_bytes, reading
from penstock.integrations.pickled import refused

_MODELS = ("model", "state_dict", "module")
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_0", "optimizer_state_dict")
_OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
#: What buffers are called that torch's own modules have, and models of transformers.
_BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked", "*inv_freq", "*position_ids")
_TILE_NUMEL = 1 << 20
_MOST_EXTRA_BYTES = 1 << 26
_MOST_STATES = 16


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
        rest = saved.divide((*_BUFFERS, *buffers))
        write_checkpoint(
            Path(out),
            [*saved.trained(), *rest.frozen],
            rule="torch's optimizer",
            groups=saved.groups,
            buffers=rest.buffers,
            extra=saved.extra(),
            most_bytes=most_bytes(saved.nbytes),
        )


@dataclass
class _Rest:
    """What of a model the optimizer does not have."""

    frozen: list[Incoming] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


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
        folders = [DcpFolder(path) for path in _folders(folder)]
        self.nbytes = sum(each.nbytes for each in folders)
        self._model: dict[str, tuple[DcpFolder, SavedTensor]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._options: dict[tuple[Any, ...], Any] = {}
        self._others: list[tuple[tuple[Any, ...], DcpFolder, Any]] = []
        for each in folders:
            self._sort(each)
        self.groups = list(self._read_groups())
        for name in (name for names, _ in self.groups for name in names):
            if name not in self._model:
                raise self._fail(f"has nothing of the parameter '{one_line(name, 200)}', which its optimizer has")

    def trained(self) -> Iterator[Incoming]:
        """List the parameters that the optimizer has."""
        names = sorted({state for states in self._states.values() for state in states if state != "step"})
        if len(names) > _MOST_STATES:
            raise self._fail(f"has an optimizer of {len(names):,} states of each parameter, which no optimizer has")
        for name in (name for names, _ in self.groups for name in names):
            where, saved = self._model[name]
            states = self._states.get(name, {})
            reads = {state: self._state(name, state, saved) for state in names}
            yield Incoming(name, saved.shape, torch.float32, self._step(name, states), _reader(where, saved), reads)

    def divide(self, patterns: Iterable[str]) -> _Rest:
        """Divide what the optimizer does not have into frozen parameters and buffers."""
        owned = {name for names, _ in self.groups for name in names}
        sharded = any(len(self._model[name][1].chunks) > 1 for name in owned)
        rest = _Rest()
        others: dict[str, Incoming] = {}
        for name, (where, saved) in self._model.items():
            if name in owned:
                continue
            read = _reader(where, saved)
            is_whole = sharded and len(saved.chunks) == 1 and bool(saved.shape) and saved.shape[0] > 1
            if (
                not saved.dtype.is_floating_point
                or is_whole
                or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            ):
                rest.buffers[name] = read(0, prod(saved.shape)).view(saved.shape)
            else:
                others[name] = Incoming(name, saved.shape, saved.dtype, 0, read, {})
        forms = {(other.shape, other.dtype) for other in others.values()}
        trained = {
            self._digest(name) for name in owned if (self._model[name][1].shape, self._model[name][1].dtype) in forms
        }
        for name, other in others.items():
            digest = self._digest(name) if trained else None
            if digest is None or digest not in trained:
                rest.frozen.append(other)
        return rest

    def extra(self) -> dict[str, Any]:
        """Read what is neither the model's nor the optimizer's."""
        found: dict[str, Any] = {}
        left = _MOST_EXTRA_BYTES
        skipped = []
        for keys, where, item in self._others:
            place = found
            for key in keys[:-1]:
                place = place.setdefault(str(key), {})
            try:
                if isinstance(item, SavedTensor):
                    left -= prod(item.shape) * item.dtype.itemsize
                    if left < 0:
                        raise CheckpointError("too large")
                    place[str(keys[-1])] = _reader(where, item)(0, prod(item.shape)).view(item.shape)
                else:
                    place[str(keys[-1])] = where.value(item)
            except CheckpointError:
                skipped.append(".".join(map(str, keys)))
        if skipped:
            warnings.warn(f"Not taken over, no plain values: {one_line(', '.join(skipped), 500)}.", stacklevel=3)
        return found

    def _sort(self, where: DcpFolder) -> None:
        """Find out what each key of a folder is of."""
        items: dict[tuple[Any, ...], Any] = {**where.tensors, **where.values}
        first = {keys[0] for keys in items}
        if len(first) == 1 and not first & {*_MODELS, *_OPTIMIZERS}:  # everything is in one thing, as in {"app": ...}
            items = {keys[1:]: item for keys, item in items.items() if len(keys) > 1}
        has_model = any(keys[0] in _MODELS and len(keys) > 1 for keys in items)
        for keys, item in items.items():
            if keys[0] in _OPTIMIZERS and len(keys) > 1:
                self._sort_state(keys[1:], where, item)
            elif isinstance(item, SavedTensor) and (keys[0] in _MODELS if has_model else len(keys) == 1):
                name = ".".join(map(str, keys[1:] if has_model else keys))
                if name in self._model:
                    raise self._fail(f"has '{one_line(name, 200)}' twice")
                self._model[name] = where, item
            else:
                self._others.append((keys, where, item))

    def _sort_state(self, keys: tuple[Any, ...], where: DcpFolder, item: Any) -> None:
        """Find out what a key of the optimizer is, of its nested form or of its flat one."""
        whole = ".".join(map(str, keys))
        kind, _, rest = whole.partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            self._states.setdefault(name, {})[last] = where, item
        elif kind == "param_groups" and name:
            group = keys[1:2] if len(keys) == 3 and keys[1].isdecimal() else name
            self._options[group, last] = self._value(where, item)
        else:
            raise self._fail(f"has '{one_line(whole, 200)}' in its optimizer, which belongs to none of torch")

    def _value(self, where: DcpFolder, item: Any) -> Any:
        """Read a value; a tensor of one element as its number."""
        if isinstance(item, SavedTensor):
            if prod(item.shape) != 1:
                raise self._fail("has a tensor where a number belongs")
            return _reader(where, item)(0, 1).item()
        value = where.value(item)
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def _read_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Read the param groups: by number, or put together again of parameters that have the same options."""
        by_group: dict[Any, dict[str, Any]] = {}
        for (group, option), value in self._options.items():
            by_group.setdefault(group, {})[option] = value
        if not by_group:
            raise self._fail(
                "has no state of an optimizer. Weights alone are read by prepare(weights=), once they are safetensors"
            )
        together: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for group, options in by_group.items():
            kept = {name: value for name, value in options.items() if name in OPTIONS}
            if isinstance(group, str):
                together.setdefault(repr(sorted(options.items())), ([], kept))[0].append(group)
                continue
            names = options.get("params")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._fail("has an optimizer that numbers parameters. Save what get_state_dict() gives")
            yield names, kept
        yield from together.values()

    def _state(self, name: str, state: str, saved: SavedTensor) -> Read:
        """Make the function that reads a state; zeros of a parameter that has none yet."""
        found = self._states.get(name, {}).get(state)
        if found is None:
            return lambda start, stop: torch.zeros(stop - start)
        where, item = found
        if not isinstance(item, SavedTensor) or item.shape != saved.shape:
            raise self._fail(f"has a state '{one_line(state, 80)}' of '{one_line(name, 200)}' that is not of its shape")
        return _reader(where, item)

    def _step(self, name: str, states: Mapping[str, Any]) -> int:
        """Read how often a parameter was updated."""
        if "step" not in states:
            return 1 if states else 0  # SGD counts nothing: that there is a momentum says all
        value = self._value(*states["step"])
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or not 0 <= value < 1 << 53:
            raise self._fail(f"has a step of '{one_line(name, 200)}' that is no count")
        return int(value)

    def _digest(self, name: str) -> bytes | None:
        """Hash a tensor's shape, dtype and elements. None for elements that are all the same, or fewer than two."""
        where, saved = self._model[name]
        numel, read = prod(saved.shape), _reader(where, saved)
        digest, differ = hashlib.blake2b(repr((saved.shape, saved.dtype)).encode()), False
        for start in range(0, numel, _TILE_NUMEL):
            values = read(start, min(start + _TILE_NUMEL, numel))
            differ |= bool((values != read(0, 1)).any())
            digest.update(values.view(torch.uint8).numpy().tobytes())
        return digest.digest() if differ else None

    def _fail(self, why: str) -> CheckpointError:
        return refused(self._folder, f"{self._folder} {why}.")


def _folders(folder: Path) -> list[Path]:
    """Find the folders that have an index."""
    if (folder / INDEX).is_file():
        return [folder]
    of_accelerate = [folder / name for name in _OF_ACCELERATE]
    if all((each / INDEX).is_file() for each in of_accelerate):
        return of_accelerate
    raise refused(
        folder,
        f"{folder} is no checkpoint of torch.distributed.checkpoint: it has neither {INDEX} nor the folders "
        f"{' and '.join(_OF_ACCELERATE)}.",
    )


def _reader(where: DcpFolder, saved: SavedTensor) -> Read:
    """Make a function that reads elements of a tensor."""
    boxes = [
        Box(
            saved.shape,
            chunk.offsets,
            chunk.sizes,
            functools.cache(functools.partial(where.chunk, chunk, saved.dtype)),
        )
        for chunk in saved.chunks
    ]
    return lambda start, stop: read_boxes(boxes, saved.dtype, start, stop)
