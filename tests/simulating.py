"""A step for real and the same step on fake tensors, each with all that is to be equal."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import is_fake
from penstock.planner.simulation.model_copy import copy_model
from penstock.planner.simulation.operation_cost import tensors_in

BLOCK_BYTES = 512
Meta = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def meta(tensor: Tensor) -> Meta:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype


@dataclass
class Seen:
    """What a step did.

    Attributes:
        calls: each operation's name, and the shapes, strides and dtypes that it returned.
        saved: those of tensors saved for backward.
        gradients: those of the parameters' gradients, by name.
        live_bytes: what was there at the end of each operation.
    """

    calls: list[tuple[str, tuple[Meta, ...]]] = field(default_factory=list)
    saved: list[Meta] = field(default_factory=list)
    gradients: dict[str, Meta | None] = field(default_factory=dict)
    live_bytes: list[int] = field(default_factory=list)
    peak_bytes: int = 0


class Counting(TorchDispatchMode):
    """The plain way: storages of what operations return, while they are alive."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.known: dict[int, weakref.ref] = {}
        self.live_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs)):  # what came from outside
            storage = tensor.untyped_storage()
            if id(storage) not in self.known:
                self.known[id(storage)] = weakref.ref(storage, partial(self.gone, id(storage), 0))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if id(storage) not in self.known:
                self.count(storage)
        self.seen.calls.append((str(func), tuple(map(meta, tensors_in(out)))))
        self.seen.live_bytes.append(self.live_bytes)
        return out

    def count(self, storage: Any) -> None:
        key, nbytes = id(storage), -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES

        self.known[key] = weakref.ref(storage, partial(self.gone, key, nbytes))
        self.live_bytes += nbytes
        self.seen.peak_bytes = max(self.seen.peak_bytes, self.live_bytes)

    def gone(self, key: int, nbytes: int, _: Any) -> None:
        del self.known[key]
        self.live_bytes -= nbytes


class Watched(FakeOperations):
    """A simulation that tells what it returned."""

    def __init__(self, seen: Seen, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.calls.append((str(func), tuple(map(meta, tensors_in(out)))))
        self.seen.live_bytes.append(self.memory.live_bytes)
        self.seen.peak_bytes = self.memory.peak_bytes
        return out


def for_real(build: Callable[[], nn.Module], work: Callable[[nn.Module], object]) -> Seen:
    """Run a step for real."""
    seen = Seen()
    model = build()
    with Counting(seen):
        _step(model, work, seen)
    return seen


def simulated(build: Callable[[], nn.Module], work: Callable[[nn.Module], object], **arguments: Any) -> Seen:
    """Simulate a step: of a model without values."""
    seen = Seen()
    model = build()
    model = copy_model(model)
    with Watched(seen, **arguments):
        _step(model, work, seen)
    assert all(is_fake(p) for p in model.parameters() if p.numel())
    return seen


def _step(model: nn.Module, work: Callable[[nn.Module], object], seen: Seen) -> None:
    def pack(tensor: Tensor) -> Tensor:
        seen.saved.append(meta(tensor))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        work(model)
    seen.gradients = {n: None if p.grad is None else meta(p.grad) for n, p in model.named_parameters()}


def differences(one: Seen, other: Seen) -> Iterator[str]:
    """Say where two steps first differ, attribute by attribute."""
    for name in ("calls", "saved", "live_bytes"):
        left, right = getattr(one, name), getattr(other, name)
        for number, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                yield f"{name}[{number}]: {a} != {b} after {one.calls[max(number - 2, 0) : number]}"
                break
        else:
            if len(left) != len(right):
                yield f"{name}: {len(left)} != {len(right)}"
    yield from (
        f"gradient of {name}: {given} != {other.gradients[name]}"
        for name, given in one.gradients.items()
        if given != other.gradients[name]
    )
    if one.peak_bytes != other.peak_bytes:
        yield f"peak_bytes: {one.peak_bytes} != {other.peak_bytes}"
