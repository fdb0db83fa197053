"""How many bytes of tensors there are at once, counted as torch's caching allocator of an accelerator counts them."""

import weakref
from functools import partial

from torch import Tensor

BLOCK_BYTES = 512  # the least that torch's caching allocator gives


def rounded(nbytes: int) -> int:
    """Return how many bytes a caching allocator counts for a tensor's memory."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class Memory:
    """Bytes that are there, and the most that were there at once. It keeps no tensor alive.

    Attributes:
        live_bytes: what is there now.
        peak_bytes: the most that was there since the last reset.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._followed: dict[int, weakref.ref[object]] = {}

    def add(self, nbytes: int) -> None:
        """Count memory that somebody takes."""
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def remove(self, nbytes: int) -> None:
        """Count memory that somebody gives back."""
        self.live_bytes -= nbytes

    def reset_peak(self) -> None:
        """Have the peak be what is there now."""
        self.peak_bytes = self.live_bytes

    def follow(self, tensor: Tensor) -> None:
        """Count an ordinary tensor's storage for as long as it lives; one that is counted already only once."""
        storage = tensor.untyped_storage()
        address = id(storage)  # torch keeps the object for as long as the storage lives
        if address in self._followed:
            return
        nbytes = rounded(storage.nbytes())
        self._followed[address] = weakref.ref(storage, partial(self._gone, address, nbytes))
        self.add(nbytes)

    def _gone(self, address: int, nbytes: int, _: object) -> None:
        del self._followed[address]
        self.remove(nbytes)
