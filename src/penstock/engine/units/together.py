"""First values that ranks have from each other: many parameters in a broadcast, and files that a host reads once."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from penstock.checkpoint.tensorfiles import Forms, StoredTensors
from penstock.errors import EngineError
from penstock.layout import round_up
from penstock.machine.collectives import Ranks
from penstock.machine.local import LocalRanks

_GRAIN_BYTES = 16  # any dtype may begin there
_PACKED_BYTES = 1 << 20  # at most, of several parameters: a larger one goes by itself


def broadcast_flat(values: Sequence[Tensor], ranks: Ranks, device: torch.device) -> list[Tensor]:
    """Give the first rank's values on every rank, flat, each in a place of its own. Collective.

    Arguments:
        values: this rank's, of the same shapes and dtypes as on the others.
        ranks: all that get them.
        device: where they are sent from and received.
    """
    found: list[Tensor] = []
    for numbers in _packs([value.nbytes for value in values]):
        nbytes = [round_up(values[number].nbytes, _GRAIN_BYTES) for number in numbers]
        # Copies: the broadcast overwrites them, and the model keeps its own values until they are in their homes.
        packed = torch.empty(sum(nbytes), dtype=torch.uint8, device=device)
        flats = []
        starts = accumulate(nbytes, initial=0)
        for number, start in zip(numbers, starts, strict=False):
            value = values[number]
            flats.append(packed[start : start + value.nbytes].view(value.dtype))
            flats[-1].view(value.shape).copy_(value)
        if packed.numel():
            ranks.broadcast(packed)
        found += flats
    return found


def broadcast_alike(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Overwrite what ranks that divide parameters have alike with the first one's; small ones together. Collective.

    Arguments:
        tensors: contiguous, in the same order, and of the same shapes and dtypes as on the others.
        ranks: all that have them.
    """
    if ranks.grid.tp == 1:
        return
    for numbers in _packs([tensor.nbytes for tensor in tensors]):
        several = [tensors[number].view(-1).view(torch.uint8) for number in numbers]
        packed = several[0] if len(several) == 1 else torch.cat(several)
        if packed.numel():
            ranks.broadcast_alike(packed)
        if len(several) > 1:
            torch._foreach_copy_(several, list(torch.split(packed, [each.numel() for each in several])))


def groups_of(sizes: Sequence[int]) -> Iterator[range]:
    """Divide units into those whose values are sent together: tiny ones, so that a model of many has few broadcasts.

    Arguments:
        sizes: their bytes.
    """
    return _packs(sizes)


def _packs(sizes: Sequence[int]) -> Iterator[range]:
    """Divide a sequence into ranges of a few bytes each, or of one that has more."""
    start = total = 0
    for number, nbytes in enumerate(sizes):
        if number > start and total + nbytes > _PACKED_BYTES:
            yield range(start, number)
            start, total = number, 0
        total += nbytes
    if start < len(sizes):
        yield range(start, len(sizes))


class SharedReads:
    """Reads of files, of which each rank of a host does a part.

    Arguments:
        files: the tensors, the same ones on each of these ranks.
        forms: their shapes and dtypes.
        ranks: those of this host.
    """

    def __init__(self, files: StoredTensors, forms: Forms, ranks: LocalRanks) -> None:
        self._files = files
        self._forms = forms
        self._ranks = ranks

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Read some tensors whole, flat and in their dtypes. Collective over the ranks of the host.

        Raises:
            Exception: on a rank that could not read its part.
            EngineError: on the others.
        """
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in (self._forms[name] for name in names)]
        starts = [0]
        for nbytes in sizes:
            starts.append(starts[-1] + round_up(nbytes, _GRAIN_BYTES))
        part = round_up(-(-starts[-1] // self._ranks.size), _GRAIN_BYTES)
        failure: Exception | None = None
        try:
            own = self._part(names, sizes, starts, self._ranks.number * part, part)
        except Exception as error:
            failure = error  # told first: the others wait for this rank
        if self._ranks.any(failure is not None):
            raise failure or EngineError("Another rank of this host could not read its part of the files.")
        whole = self._ranks.exchange(own)
        found = zip(names, sizes, starts, strict=False)
        return [whole[start : start + nbytes].view(self._forms[name][1]) for name, nbytes, start in found]

    def give_up(self) -> None:
        """Tell the others, who are about to read more, that this rank does not. Collective."""
        self._ranks.any(True)

    def close(self) -> None:
        """Leave the others."""
        self._ranks.close()

    def _part(
        self, names: Sequence[str], sizes: Sequence[int], starts: Sequence[int], first: int, nbytes: int
    ) -> Tensor:
        """Read some bytes of what the tensors are when they lie one after the other."""
        own = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        for name, size, start in zip(names, sizes, starts, strict=False):
            begin, end = max(start, first), min(start + size, first + nbytes)
            if begin < end:
                itemsize = self._forms[name][1].itemsize
                values = self._files.read(name, (begin - start) // itemsize, (end - start) // itemsize)
                own[begin - first : end - first] = values.contiguous().view(torch.uint8)
        return own
