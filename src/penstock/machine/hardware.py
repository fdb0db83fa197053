"""What streams and clocks ask of an accelerator: streams, events, and which of its streams a thread is on.

torch's own classes do, whichever device it is; where a device's module has events for which the host waits without
spinning, that module's. Its streams and events go together then: torch takes the one's for the other's unseen. A
thread's current device and current stream are its own: a new thread is on the first device, on its default stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.machine.devices import sleeping_event


class Hardware:
    """One device, as streams use it. Of its streams and events: `event.record(stream)`, `event.wait(stream)`."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._own = sleeping_event(device) is not None
        index: int | None = device.index
        if index is None and not self._own:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self._compute: Any = None  # the stream that compute was on last

    def make_stream(self) -> Any:
        """A new stream."""
        if self._own:
            with self._module.device(self.device):
                return self._module.Stream()
        return torch.Stream(self.device)

    def make_event(self, *, timing: bool = False) -> Any:
        """A new event, which is over while nothing was recorded."""
        if self._own:
            return self._module.Event(enable_timing=timing, blocking=True)
        return torch.Event(self.device, enable_timing=timing)  # said: what it is by default has changed

    def current(self) -> Any:
        """The stream of the device that the calling thread is on."""
        if self._own:
            return self._module.current_stream(self.device)
        return torch.accelerator.current_stream(self.device)

    def compute(self) -> Any:
        """The stream that compute is on, in the calling thread, which is one of the user's or of autograd.

        Compute is one sequence: where it has turned to another stream since the last call, that one follows the one
        before.
        """
        stream, before = self.current(), self._compute
        if before is None or stream != before:
            self._compute = stream
            if before is not None:
                self.recorded(before).wait(stream)
        return stream

    def recorded(self, stream: Any) -> Any:
        """An event: all that a stream was given until now is over."""
        event = self.make_event()
        event.record(stream)
        return event

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Have the calling thread on the device, and on one of its streams."""
        if self._own:
            with self._module.device(self.device), self._module.stream(stream):
                yield
            return
        with torch.accelerator.device_index(self.device.index):
            before = self.current()
            torch.accelerator.set_stream(stream)  # torch.Stream's own block keeps what was before in the stream itself
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def synchronize(self) -> None:
        """Block until all that the device was given is over."""
        if self._own:
            self._module.synchronize(self.device)
        else:
            torch.accelerator.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give memory that torch keeps for reuse back to the device."""
        if hasattr(torch.accelerator, "empty_cache") and not self._own:  # since torch 2.9
            torch.accelerator.empty_cache()
        elif hasattr(self._module, "empty_cache"):
            with self._module.device(self.device):
                self._module.empty_cache()
