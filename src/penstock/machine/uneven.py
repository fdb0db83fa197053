"""Collectives of flat buffers whose shards are of any sizes: one for each shard, together as long as each of them.

A gather is a broadcast of each shard by the rank that has it, a reduction one of each part to the rank that it belongs
to: over a link goes as much as of equal shards, and nothing for a rank that has none.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from penstock.machine.arena import view_apart


class Together:
    """Collectives that were issued one after the other, as torch's handle of one of them.

    Arguments:
        works: torch's handles.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all of them are over; raise the first error."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all of them are over."""
        return all(work.is_completed() for work in self._works)


def parts_of(full: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    """Cut a flat buffer into shards: views of it.

    Arguments:
        full: the buffer.
        cuts: where shards begin in it, in elements, and where the last one ends.
    """
    return [full[start:stop] for start, stop in pairwise(cuts)]


def broadcast_shards(parts: Sequence[Tensor], full: Tensor, group: dist.ProcessGroup | None) -> Together | None:
    """Fill the shards of a flat buffer, each with what its rank has. Collective.

    Arguments:
        parts: the shards, as bytes, in the order of the ranks.
        full: the buffer that they are views of.
        group: of the ranks.

    Returns:
        On the host what is to be waited for. On a device `None`: its stream waits.
    """
    goes_on = full.device.type == "cpu"
    if goes_on and type(full) is Tensor:  # no fake one
        parts = [view_apart(part, full) for part in parts]
    works = [dist.broadcast(part, group_src=rank, group=group, async_op=goes_on) for rank, part in enumerate(parts)]
    return Together([work for work in works if work is not None]) if goes_on else None


def reduce_to_owners(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each part of a flat buffer to the rank that it belongs to, in place; on the others it is spoilt. Collective.

    Arguments:
        parts: this rank's summands, in the order of the ranks.
        group: of the ranks.
    """
    for rank, part in enumerate(parts):
        dist.reduce(part, group_dst=rank, op=dist.ReduceOp.SUM, group=group)
