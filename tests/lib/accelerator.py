"""An accelerator that is made up: what is enqueued on it is logged, and takes the time that the test says."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from penstock.runtime.streams import ON_DEVICE


class FakeTime:
    """The host's clock, which only moves when the host waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeAccelerator:
    """A device's module: each stream is a point in time, which work, events and waits move.

    Attributes:
        log: the waits that were enqueued, or that the host has made.
        over: whether the device is idle; tests change it.
        timed: how many events tell the time.
    """

    slow = 5.0  # how far the device's clock is from the host's

    def __init__(self) -> None:
        self.time = time = FakeTime()
        self.log: list[str] = []
        self.over = True
        self.timed = 0
        self.streams: list[Any] = []
        self._current = threading.local()
        accelerator = self

        class Stream:
            def __init__(self, name: str | None = None) -> None:
                self.name = name or ON_DEVICE[len(accelerator.streams)]
                self.now = time.now + accelerator.slow
                if name is None:
                    accelerator.streams.append(self)

        class Event:
            stream, at = "", 0.0

            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                assert blocking, "a host that waits spins"
                self.enable_timing = enable_timing
                accelerator.timed += enable_timing

            def record(self, stream: Stream) -> None:
                stream.now = self.at = max(stream.now, time.now + accelerator.slow)
                self.stream = stream.name

            def wait(self, stream: Stream) -> None:
                accelerator.log.append(f"{stream.name} waits for {self.stream}")
                stream.now = max(stream.now, self.at)

            def query(self) -> bool:
                return accelerator.over and self.at <= time.now + accelerator.slow

            def synchronize(self) -> None:
                accelerator.log.append(f"host waits for {self.stream}")
                time.now = max(time.now, self.at - accelerator.slow)

            def elapsed_time(self, end: "Event") -> float:
                assert self.enable_timing
                assert end.enable_timing
                assert end.query(), "a device refuses to tell the time of what it has not reached"
                return (end.at - self.at) * 1e3

        self.compute = Stream("compute")
        self.Stream, self.Event = Stream, Event

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        yield
        self._current.stream = before

    def current_stream(self, device: torch.device | None = None) -> Any:
        return getattr(self._current, "stream", self.compute)

    def synchronize(self, device: torch.device) -> None:
        self.log.append("host waits for all")
        self.time.now = max(self.time.now, *(s.now - self.slow for s in (*self.streams, self.compute)))

    def work(self, seconds: float) -> None:
        """Enqueue a kernel or a copy."""
        self.current_stream().now += seconds
