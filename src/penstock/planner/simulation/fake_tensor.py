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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.errors import ConfigError, one_line

T = TypeVar("T")

_NORESERVE = 0x4000  # of Linux: the kernel promises no memory for these addresses
_LEAST_BYTES = 1 << 36
_MOST_BYTES = 1 << 45  # a quarter of what a process can address
_PAGE_BYTES = 4096
BLOCK_BYTES = 512  # the least that torch's caching allocator gives

_NOTES_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutogradCPU
)


class ByStorage(Generic[T]):
    """What is known of storages, for as long as each lives: for as long torch keeps the object of each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensor: Tensor) -> T | None:
        """Return what is known of a tensor's storage; `None` where nothing is."""
        if not self._known:
            return None
        known = self._known.get(id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def put(self, tensor: Tensor, value: T | None, gone: Callable[[], None] = lambda: None) -> None:
        """Note something of a tensor's storage, in place of what was known; `None` where nothing is any more.

        `gone` is called when the storage is freed.
        """
        storage = tensor.untyped_storage()
        if value is None:
            self._known.pop(id(storage), None)
        else:
            self._known[id(storage)] = weakref.ref(storage, partial(self._gone, id(storage), gone)), value

    def _gone(self, key: int, gone: Callable[[], None], _: object) -> None:
        del self._known[key]
        gone()


class _Space:
    """Addresses without memory, lent in pages. What comes back is lent again, so steps that repeat need no more."""

    def __init__(self) -> None:
        self._memory = memoryview(_reserved())
        self._next = 0
        self._free: dict[int, list[int]] = {}
        self._lent: dict[int, weakref.ref[memoryview]] = {}
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
        self._lent[start] = weakref.ref(memory, partial(self._take_back, start, size, freed))
        return memory

    def _take_back(self, start: int, size: int, freed: Callable[[], None] | None, _: object) -> None:
        del self._lent[start]
        self._free.setdefault(size, []).append(start)
        if freed is not None:
            freed()


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

    space: _Space | None = None


_process = _Process()  # addresses are the process's: whether a tensor is fake does not depend on who asks


def space() -> _Space:
    """Return the process's addresses without memory, reserved on first use."""
    if _process.space is None:
        _process.space = _Space()
    return _process.space


class Memory:
    """How many bytes of tensors there are at once, counted as torch's caching allocator of an accelerator counts them.

    It keeps no tensor alive.

    Attributes:
        live_bytes: what is there now.
        peak_bytes: the most that was there at once.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._followed: ByStorage[bool] = ByStorage()

    def add(self, nbytes: int) -> None:
        """Count memory that somebody takes."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def remove(self, nbytes: int) -> None:
        """Count memory that somebody gives back."""
        self.add(-nbytes)

    def follow(self, tensor: Tensor) -> None:
        """Count an ordinary tensor's storage for as long as it lives; one that is counted already only once.

        Sparse tensors have no storage, and are not counted.
        """
        if tensor.layout is torch.strided and not self._followed.get(tensor):
            nbytes = rounded(tensor.untyped_storage().nbytes())
            self._followed.put(tensor, True, partial(self.remove, nbytes))
            self.add(nbytes)


def rounded(nbytes: int) -> int:
    """Return how many bytes a caching allocator counts for a tensor's memory."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Shaped:
    """A tensor without values: what results are made from, and examples of arguments.

    Attributes:
        shape: its shape.
        strides: its strides, in elements.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def extent(self) -> int:
        """Elements of a storage between its first and its last one, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @cached_property
    def nbytes(self) -> int:
        """Bytes from its first element to its last one."""
        return self.extent * self.dtype.itemsize

    def fake(self, freed: Callable[[], None] | None = None) -> Tensor:
        """Make a fake tensor; an ordinary one where it has no elements. `freed` is called when its memory goes back."""
        shape, strides, dtype = self.shape, self.strides, self.dtype
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if self.extent == 0:
                return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            flat = torch.frombuffer(space().take(self.nbytes, freed), dtype=dtype, count=self.extent)
            if len(shape) == 1 and strides[0] == 1:
                return flat
            # Torch must not take it for a view of the flat one: operations in place on it would be recorded as of a
            # view.
            with torch._C._ExcludeDispatchKeyGuard(_NOTES_VIEWS):
                return flat.as_strided(shape, strides)


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
        >>> is_fake(fake_tensor((4096, 4096), torch.bfloat16).t()[7])
        True
    """
    shape = (numel_or_shape,) if isinstance(numel_or_shape, int) else tuple(numel_or_shape)
    return Shaped(shape, contiguous_strides(shape) if strides is None else tuple(strides), dtype).fake(freed)


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
