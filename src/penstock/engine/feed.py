"""Gradients brought to the update, tile by tile, where it cannot read them at their home."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from penstock.engine.unit import Trained
from penstock.kinds import Tier
from penstock.machine.streams import DONE, DOWNLOAD, UPLOAD, Event, Streams, copy


class Feed:
    """Two tile buffers beside the optimizer state: one is filled while the other is used.

    Arguments:
        staging: the buffers, in the gradients' dtype.
        tile_numel: elements of a tile.
    """

    def __init__(self, streams: Streams, staging: tuple[Tensor, Tensor], tile_numel: int) -> None:
        self._streams = streams
        self._staging = staging
        self._tile_numel = tile_numel
        self._free: list[Event] = [DONE, DONE]

    def bring(self, trained: Trained, tile: int, use: Callable[[Tensor, int, Event], Event]) -> Event:
        """Copy a tile's gradient into the next buffer.

        Arguments:
            trained: the unit's trained state.
            tile: the tile's number in the shard.
            use: called with the buffer, the element of the shard that it begins with, and the event of the copy;
                returns the event after which the buffer is free.
        """
        turn = tile % 2
        first = tile * self._tile_numel
        source = trained.gradient.home[first : first + self._tile_numel]
        target = self._staging[turn][: source.numel()]
        copied = self._streams.submit(
            UPLOAD if trained.optimizer_tier is Tier.DEVICE else DOWNLOAD,
            partial(copy, target, source),
            after=(trained.gradient.ready, self._free[turn]),
            writes=(target,),
            nbytes=source.numel() * source.element_size(),
        )
        self._free[turn] = use(target, first, copied)
        return self._free[turn]
