"""Fake tensors: plain tensors of the cpu over addresses whose memory nobody touches. They cost address space alone.

    fake     its storage lies in addresses that were reserved and never given memory
    marked     its storage is an ordinary one, but what it holds is unknown: it was written from fake values
    real       everything else, and whatever has no elements

Views of a fake tensor are fake: they lie in the same addresses. An ordinary storage is marked for as long as it
lives, whatever its size becomes.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import ConfigError, one_line

T = TypeVar("T")

_NORESERVE = 0x4000  # of Linux: the kernel promises no memory for these addresses
_LEAST_BYTES = 1 << 36
_MOST_BYTES = 1 << 45  # a quarter of what a process can address
_PAGE_BYTES = 4096

_NOTES_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradCPU
)


class ByStorage(Generic[T]):
    """What is known of storages, for as long as each lives.

    A weak reference to a storage keeps its address from being another's, so the address stands for it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, T]] = {}
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensor: Tensor) -> T | None:
        """Return what is known of a tensor's storage; `None` where nothing is."""
        if not self._known:
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def put(self, tensor: Tensor, value: T | None) -> None:
        """Note something of a tensor's storage, in place of what was known; `None` where nothing is any more."""
        if len(self._known) >= self._sweep_at:
            gone = [address for address, entry in self._known.items() if entry[0].expired()]  # type: ignore[no-untyped-call]
            for address in gone:
                del self._known[address]
            self._sweep_at = max(64, 2 * len(self._known))
        storage = tensor.untyped_storage()
        if value is None:
            self._known.pop(storage._cdata, None)
            return
        self._known[storage._cdata] = (StorageWeakRef(storage), value)  # type: ignore[no-untyped-call]


class _Lent(weakref.ref[memoryview]):
    """A range of addresses that a storage has; what is to happen once it has gone."""

    __slots__ = ("freed", "size", "start")

    start: int
    size: int
    freed: Callable[[], None] | None


class _Space:
    """Addresses without memory, lent in pages. What comes back is lent again, so steps that repeat need no more."""

    def __init__(self) -> None:
        self._memory = memoryview(_reserved())
        self._next = 0
        self._free: dict[int, list[int]] = {}
        self._lent: dict[int, _Lent] = {}
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.end = self.start + len(self._memory)
        self.marked: ByStorage[bool] = ByStorage()

    def take(self, nbytes: int, freed: Callable[[], None] | None) -> memoryview:
        """Lend so many bytes until nobody refers to them any more; `freed` is called then."""
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        back = self._free.get(size)
        if back:
            start = back.pop()
        else:
            start = self._next
            if start + size > len(self._memory):
                raise ConfigError(
                    f"simulation: a tensor of {nbytes:,} bytes does not fit {len(self._memory):,} bytes of addresses "
                    "which this process could reserve; lift its limit (ulimit -v unlimited), or plan a smaller batch"
                )
            self._next = start + size
        memory = self._memory[start : start + size]
        lent = _Lent(memory, self._take_back)
        lent.start, lent.size, lent.freed = start, size, freed
        self._lent[id(lent)] = lent
        return memory

    def _take_back(self, lent: _Lent) -> None:
        del self._lent[id(lent)]
        self._free.setdefault(lent.size, []).append(lent.start)
        if lent.freed is not None:
            lent.freed()


def _reserved() -> mmap.mmap:
    """Reserve as many addresses as there are to have."""
    nbytes = _MOST_BYTES
    while True:
        try:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            nbytes //= 2
            if nbytes < _LEAST_BYTES:
                raise ConfigError(
                    f"simulation: this process cannot reserve {_LEAST_BYTES:,} bytes of addresses ({one_line(error)}); "
                    "lift its limit on address space (ulimit -v unlimited, vm.overcommit_memory 0 or 1)"
                ) from error


class _Process:
    """What the process has of addresses without memory: nothing before the first fake tensor."""

    def __init__(self) -> None:
        self.space: _Space | None = None


_process = _Process()  # addresses are the process's: whether a tensor is fake does not depend on who asks


def space() -> _Space:
    """Return the process's addresses without memory, reserved on first use."""
    if _process.space is None:
        _process.space = _Space()
    return _process.space


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of a storage lie between a tensor's first and last one, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def fake_tensor(
    numel_or_shape: int | Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
    *,
    freed: Callable[[], None] | None = None,
) -> Tensor:
    """Make a tensor of the cpu over memory that nobody touches: a plain tensor with an address of its own.

    Arguments:
        numel_or_shape: elements, of a flat one; or its shape.
        dtype: any that torch has, of floating point, complex, integers or bool.
        strides: contiguous ones where none are given.
        freed: called when the memory goes back; it must not raise.

    Returns:
        The tensor; an ordinary one where it has no elements.

    Raises:
        ConfigError: this process cannot reserve so many addresses.

    Example:
        >>> is_hollow(fake((4096, 4096), torch.bfloat16).t()[7])
        True
    """
    shape = (numel_or_shape,) if isinstance(numel_or_shape, int) else tuple(numel_or_shape)
    strides = contiguous_strides(shape) if strides is None else tuple(strides)
    count = extent(shape, strides)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if count == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        flat = torch.frombuffer(space().take(count * dtype.itemsize, freed), dtype=dtype, count=count)
        if len(shape) == 1 and strides[0] == 1:
            return flat
        # Torch must not take it for a view of the flat one: operations in place on it would be recorded as of a view.
        with _NoViews():
            return flat.as_strided(shape, strides)


class _NoViews:
    """A block in which what torch makes of a tensor is not noted to be a view of it."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = torch._C._ExcludeDispatchKeyGuard(_NOTES_VIEWS)
        self._guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        self._guard.__exit__(*raised)


def is_fake(tensor: Tensor) -> bool:
    """Whether nobody knows what a tensor holds: it is fake, or marked. Views are as what they are views of."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    known = space()
    return known.start <= tensor.data_ptr() < known.end or bool(known.marked.get(tensor))


def mark(tensor: Tensor) -> None:
    """Have an ordinary tensor's storage count as fake from now on: what it holds is unknown."""
    known = space()
    if not known.start <= tensor.data_ptr() < known.end:
        known.marked.put(tensor, True)


def adopt(module: nn.Module) -> None:
    """Make a module's parameters fake, and of its buffers those that have no values (on the meta device).

    A tensor that is there twice stays one. Buffers with values keep them: masks and positions are computed from these.

    Arguments:
        module: on the meta device or with values, in whole or in part; it changes in place.

    Raises:
        ConfigError: this process cannot reserve so many addresses.
    """
    made: dict[int, Tensor] = {}  # the module keeps the old ones alive until all are replaced: see `olds`
    olds: list[Tensor] = []
    for tensors, name, old in list(_slots(module)):
        new = made.get(id(old))
        if new is None:
            olds.append(old)
            new = made[id(old)] = _fake_like(old)
        tensors[name] = new


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield where a module has the tensors that are made fake."""
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters  # of torch's own kind: parameters or nothing
        yield from ((parameters, name, old) for name, old in parameters.items() if old is not None)
        buffers: dict[str, Any] = part._buffers
        yield from ((buffers, name, old) for name, old in buffers.items() if old is not None and old.is_meta)


def _fake_like(old: Tensor) -> Tensor:
    if not prod(old.shape):
        values = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
    else:
        values = fake_tensor(old.shape, old.dtype, old.stride())
    if not isinstance(old, nn.Parameter):
        return values
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new
