"""Which of the host's tiles the device updates: up, update, down, through spare memory and beside compute.

A step's updates last as long as the slower side. Both sides work through the tiles in the same order, mixed evenly, so
that units are finished one after the other, as forward wants them. Which share the device takes is stated, or measured:
if in a second the host updates h elements and the device d, links included, the device's share is d / (h + d).

Source: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
Offloading", 2024.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from penstock.engine.update import TileUpdate
from penstock.kinds import Tier
from penstock.machine.clocks import Clock, HostClock
from penstock.machine.streams import Streams

FIRST_SHARE = 0.25
#: The first step compiles kernels. What the others find last is kept: a share that never rests is a run that nobody can
#: repeat, because the device may round otherwise than the host.
WARM_UP_STEPS, MEASURED_STEPS = 1, 4

log = logging.getLogger(__name__)


class Sharing:
    """Divides the tiles whose state rests off the device between the host and the device.

    Arguments:
        share: the device's part of them, or "auto".

    Attributes:
        share: as it is now.
    """

    def __init__(self, share: float | Literal["auto"], streams: Streams) -> None:
        self._streams = streams
        self.share = FIRST_SHARE if share == "auto" else share
        self._steps_left = WARM_UP_STEPS + MEASURED_STEPS if share == "auto" else 0
        self._clock: Clock | None = None
        self._race: _Race | None = None

    def divide(self, tiles: Sequence[TileUpdate]) -> None:
        """Mark the tiles of a step that are to be streamed through the device."""
        if self._race is not None:
            self._learn(self._race.fair_share())
        off_device = [tile for tile in tiles if tile.beside is Tier.CPU]
        for number, tile in enumerate(off_device):
            tile.streamed = math.floor((number + 1) * self.share) > math.floor(number * self.share)
        if self._steps_left:
            self._clock = self._clock or self._streams.device_clock()
            self._race = _Race(off_device, self._clock)

    def _learn(self, share: float | None) -> None:
        self._race = None
        if share is None:
            return
        self._steps_left -= 1
        if self._steps_left < MEASURED_STEPS:
            self.share = share
        if self._steps_left == 0:
            log.info("The device updates %.0f %% of the tiles whose optimizer state rests elsewhere.", 100 * share)


class _Race:
    """The two sides of one step: from now until the last tile of each is updated."""

    def __init__(self, tiles: Sequence[TileUpdate], device: Clock) -> None:
        self._clocks = {False: HostClock(), True: device}  # by `streamed`, as the others
        self._began = HostClock().mark()
        self._numels: dict[bool, int] = {}
        self._ends: dict[bool, Any] = {}
        for streamed in self._clocks:
            own = [tile for tile in tiles if tile.streamed is streamed]
            self._numels[streamed] = sum(run.stop - run.start for tile in own for run in tile.runs)
            if own:
                own[-1].then = partial(self._end, streamed)

    def _end(self, streamed: bool) -> None:
        self._ends[streamed] = self._clocks[streamed].mark()

    def fair_share(self) -> float | None:
        """At which both sides would have ended together; `None` where one had nothing to do or is not over."""
        speeds = {}
        for streamed, mark in self._ends.items():
            end = self._clocks[streamed].seconds(mark)
            if end is None:
                return None
            speeds[streamed] = self._numels[streamed] / max(end - self._began, 1e-9)
        return speeds[True] / (speeds[True] + speeds[False]) if len(speeds) == 2 else None
