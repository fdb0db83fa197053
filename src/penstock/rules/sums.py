"""Checksums of memory that an update reads and writes, taken in its own pass: the bytes are in the cache then."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from penstock import _native
from penstock._native import Pool
from penstock.rules.rule import Hyper, Rule, Segment


class _Part(NamedTuple):
    """Bytes that a pass has summed: where they are, and their CRC-32C as they were and as they are."""

    start: int
    nbytes: int
    before: int
    after: int


class Sums:
    """The CRC-32C of some memory, as it was before an update and as it is after it.

    Arguments:
        memory: contiguous tensors on the cpu: what is to be known of.
    """

    def __init__(self, memory: Iterable[Tensor]) -> None:
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory]
        self._parts: list[_Part] = []

    def __bool__(self) -> bool:
        """Whether anything is to be known."""
        return bool(self._ranges)

    def among(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """Pick out the tensors that lie in the memory: a pass over them is to sum these, whole."""
        return [
            tensor
            for tensor in tensors
            if tensor is not None and any(start <= tensor.data_ptr() < stop for start, stop in self._ranges)
        ]

    def note(self, tensors: Sequence[Tensor], sums: Sequence[tuple[int, int]]) -> None:
        """Note what a pass has found of tensors, before and after."""
        for tensor, (before, after) in zip(tensors, sums, strict=True):
            self._parts.append(_Part(tensor.data_ptr(), tensor.nbytes, before, after))

    def of(self, memory: Tensor) -> tuple[int, int]:
        """Compute the CRC-32C of some of the memory before the update and after it, in the order of its bytes.

        What no pass has summed is as it was: padding, gaps between runs, parameters without a gradient.
        """
        at, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        before = after = 0
        inside = sorted(part for part in self._parts if at <= part.start < stop)
        for part in (*inside, _Part(stop, 0, 0, 0)):
            nbytes = part.start - at
            between = _native.crc32c(at, nbytes)
            before = _native.crc32c_join(_native.crc32c_join(before, between, nbytes), part.before, part.nbytes)
            after = _native.crc32c_join(_native.crc32c_join(after, between, nbytes), part.after, part.nbytes)
            at = part.start + part.nbytes
        return before, after


@runtime_checkable
class Summing(Protocol):
    """A rule whose pass over host memory can sum what it touches."""

    def update_summed(
        self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None, sums: Sums
    ) -> None:
        """Do what `Rule.update_many` does to segments of host memory, and note what of them `sums` asks for."""


def update_many(
    rule: Rule, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None, sums: Sums
) -> None:
    """Apply a rule to segments, as its `update_many` does, and sum what of them is asked for."""
    if sums:
        assert isinstance(rule, Summing)
        rule.update_summed(segments, grad_scale, pool, sums)
    else:
        rule.update_many(segments, grad_scale, pool)
