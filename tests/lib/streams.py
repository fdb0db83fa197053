"""Devices on which nothing is asynchronous, and streams with delays of the test's choice."""

import random
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from penstock.engine.unit.parameter import ReleasedTensor
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import Event, InlineStreams, Streams, Work
from tests.lib.accelerator import FakeTime


def inline() -> Streams:
    """Nothing asynchronous: what a cpu as the device gets."""
    return InlineStreams(torch.device("cpu"))


class SeparateStreams(InlineStreams):
    """A device whose memory is not the host's, on which nothing is asynchronous: gathers copy, releases free."""

    aliases_host = False


def separate() -> Streams:
    """Nothing asynchronous, everything moved: the arithmetic and the memory of an accelerator."""
    return SeparateStreams(torch.device("cpu"))


def simulated(seed: int = 0, most_seconds: float = 0.002) -> SimulatedStreams:
    """Asynchronous streams with random delays."""
    delays = random.Random(seed)
    return SimulatedStreams(lambda stream, nbytes: delays.uniform(0, most_seconds))


def late() -> SimulatedStreams:
    """The same, with short delays."""
    return simulated(most_seconds=0.0005)


def released(seed: int = 0, most_seconds: float = 0.002) -> SimulatedStreams:
    """The same, where units are released and gathered for each use also if compute could read them in place."""
    streams = simulated(seed, most_seconds)
    streams.reads_in_place = False
    return streams


def until_waited_for(events: Collection[Event] | None = None, *, or_once: Callable[[], bool] = lambda: False) -> None:
    """Work that is over once the main thread waits: for anything, or for one of some events, which may come later."""
    main = threading.main_thread().ident
    while not or_once():
        frame: FrameType | None = sys._current_frames()[main]
        is_waiting = frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"
        while is_waiting and frame is not None:
            if events is None or frame.f_locals.get("self") in events:
                return
            frame = frame.f_back
        time.sleep(0.001)


def is_released(parameter: Tensor) -> bool:
    """Whether a parameter's values are not there."""
    return issubclass(type(parameter), ReleasedTensor)


class BrokenError(Exception):
    pass


class BreakingStreams(SimulatedStreams):
    """All work of one stream fails from the moment that it is named."""

    broken: str | None = None

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def fail() -> None:
            raise BrokenError(stream)

        return super().submit(stream, fail if stream == self.broken else work, **rest)


class GatedStreams(SimulatedStreams):
    """Work of some streams runs when it is let through, one by one in order."""

    def __init__(self, *gated: str) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.gated = gated
        self.let_through = threading.Semaphore(0)

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def late() -> Any:
            assert self.let_through.acquire(timeout=60)
            return work()

        return super().submit(stream, late if stream in self.gated else work, **rest)


class LastingStreams(SimulatedStreams):
    """Each piece of work on a stream lasts a second of a made-up clock, from the moment that the main thread waits."""

    def __init__(self, clock: FakeTime, slow: str) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.clock, self.slow = clock, slow

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def late() -> Any:
            until_waited_for()
            self.clock.sleep(1)
            return work()

        return super().submit(stream, late if stream == self.slow else work, **rest)


#: By name, for parametrised tests: what a cpu as the device gets, an accelerator without and with asynchronous work.
STREAMS = {"inline": inline, "separate": separate, "late": simulated, "released": released}
