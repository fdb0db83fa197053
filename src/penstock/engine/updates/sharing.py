"""Which of the host's tiles the device updates: up, update, down, through spare memory and beside compute.

A step's updates last as long as the slower side. Both sides work through the tiles in the same order, mixed evenly, so
that units are finished one after the other, as forward wants them. Which share the device takes is stated, or measured:
if in a second the host updates h elements and the device d, links included, the device's share is d / (h + d).

Source: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
Offloading", 2024.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from penstock.engine.updates.update import TileUpdate, join
from penstock.kinds import Tier
from penstock.machine.clocks import Clock, HostClock
from penstock.machine.streams import Streams

FIRST_SHARE = 0.25
#: The first step compiles kernels. What the others find last is kept: a share that never rests is a run that nobody can
#: repeat, where the device rounds otherwise than the host (`rules.compiler.rounds_as_host`).
WARM_UP_STEPS, MEASURED_STEPS = 1, 4

log = logging.getLogger(__name__)


class Sharing:
    """Divides the tiles whose state rests off the device between the host and the device.

    Arguments:
        share: the device's part of them, or "auto" to measure which is best.
        streams: those of the device, whose clock is asked.
        at_once: tells how many tiles from a given one on the device takes at once.

    Attributes:
        share: the device's part of them as it is now.
    """

    def __init__(
        self,
        share: float | Literal["auto"],
        streams: Streams,
        at_once: Callable[[TileUpdate], int] = lambda _: 1,
    ) -> None:
        self._streams = streams
        self._at_once = at_once
        self.share = FIRST_SHARE if share == "auto" else share
        self._steps_left = WARM_UP_STEPS + MEASURED_STEPS if share == "auto" else 0
        self._clock: Clock | None = None
        self._race: _Race | None = None

    def divide(self, tiles: Sequence[TileUpdate]) -> list[TileUpdate]:
        """Mark those tiles of a step that are to be streamed through the device, and join them to stretches.

        Returns:
            All tiles, in the same order.
        """
        # The race of the step before is asked, and not waited for: the host would stand still for a measurement.
        if self._race is not None:
            self._learn(self._race.fair_share())
        divided: list[TileUpdate] = []
        passed = taken = 0
        for group in self._groups(tiles):
            if not _is_divided(group[0]):
                divided += group
                continue
            passed += len(group)
            if self.share > 0 and taken + len(group) <= self.share * passed:
                taken += len(group)
                group = [join(group) if len(group) > 1 else group[0]]
                group[0].streamed = True
            divided += group
        if self._steps_left:
            self._clock = self._clock or self._streams.device_clock()
            self._race = _Race([tile for tile in divided if _is_divided(tile)], self._clock)
        return divided

    def _groups(self, tiles: Sequence[TileUpdate]) -> Iterator[list[TileUpdate]]:
        """Yield groups of neighbouring tiles that the device takes at once, in order."""
        group: list[TileUpdate] = []
        most = 0
        for tile in tiles:
            follows = group and tile.unit is group[0].unit and tile.number == group[-1].number + 1
            if not follows or len(group) >= most:
                if group:
                    yield group
                group, most = [], self._at_once(tile) if _is_divided(tile) else 1
            group.append(tile)
        if group:
            yield group

    def _learn(self, share: float | None) -> None:
        """Take up the share at which both sides would have ended together, unless that is not known yet."""
        self._race = None
        if share is None:
            return
        self._steps_left -= 1
        if self._steps_left < MEASURED_STEPS:
            self.share = share
        if self._steps_left == 0:
            log.info("The device updates %.0f %% of the tiles whose optimizer state rests elsewhere.", 100 * share)


def _is_divided(tile: TileUpdate) -> bool:
    """Whether a tile is one of those that both sides may update."""
    return tile.divisible and tile.beside is Tier.CPU


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
                own[-1].then = partial(self._end, streamed)  # the last: tiles of one side are updated in order

    def _end(self, streamed: bool) -> None:
        self._ends[streamed] = self._clocks[streamed].mark()

    def fair_share(self) -> float | None:
        """Compute the share at which both sides would have ended together; `None` if one did nothing or is not over."""
        speeds = {}
        for streamed, mark in self._ends.items():
            end = self._clocks[streamed].seconds(mark)
            if end is None:
                return None
            speeds[streamed] = self._numels[streamed] / max(end - self._began, 1e-9)
        return speeds[True] / (speeds[True] + speeds[False]) if len(speeds) == 2 else None
