"""What streams and clocks ask of an accelerator: streams, events, and which of its streams a thread is on.

torch's own classes do it, whichever device it is. A device's module may have events of its own which let the host sleep
while it waits; then that module's events and streams are used, both of them, since torch takes the one module's for the
other's without a word. A thread's current device and current stream are its own: a new thread is on the first device,
on its default stream.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Set to 1 in the environment, a thread that waits for a CUDA event spins on a core of its own.
SPINNING_EVENTS = "PENSTOCK_SPINNING_EVENTS"


class Hardware:
    """One device, as streams use it.

    Of the streams and events that it makes, these methods are used: `event.record(stream)`, `event.wait(stream)`,
    `event.query()`, `event.synchronize()`, `event.elapsed_time(event)`.

    Arguments:
        device: an accelerator; without an index it is torch's current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._own = _has_sleeping_events(self._module)
        index: int | None = device.index
        if index is None and not self._own:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self._compute: Any = None  # the stream that compute was on last

    def make_stream(self) -> Any:
        """Make a stream."""
        if self._own:
            with self._module.device(self.device):
                return self._module.Stream()
        return torch.Stream(self.device)

    def make_event(self, *, timing: bool = False) -> Any:
        """Make an event. It is over as long as nothing was recorded.

        Arguments:
            timing: whether the event notes when the device came to it.
        """
        if self._own:
            # The host sleeps, and a core stays free, unless its wake-up is too long to wait for.
            sleeps = os.environ.get(SPINNING_EVENTS) != "1"
            return self._module.Event(enable_timing=timing, blocking=sleeps)
        return torch.Event(self.device, enable_timing=timing)  # said: what it is by default has changed

    def current(self) -> Any:
        """Return the stream of the device that the calling thread is on."""
        if self._own:
            return self._module.current_stream(self.device)
        return torch.accelerator.current_stream(self.device)

    def compute(self) -> Any:
        """Return the stream that compute is on. The calling thread is one of the user's, or of autograd."""
        stream, before = self.current(), self._compute
        if before is None or stream != before:
            self._compute = stream
            if before is not None:
                # Compute is one sequence, but a device runs two streams side by side. Where a user has turned to
                # another stream, what it computes there could read a buffer before the stream that fills it is done.
                self.recorded(before).wait(stream)
        return stream

    def recorded(self, stream: Any) -> Any:
        """Return an event that is over once all that a stream was given until now is over."""
        event = self.make_event()
        event.record(stream)
        return event

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Have the calling thread on the device and on one of its streams, inside of a `with` block."""
        if self._own:
            with self._module.device(self.device), self._module.stream(stream):
                yield
            return
        with torch.accelerator.device_index(self.device.index):
            before = self.current()
            # Not torch.Stream's own block: it keeps what was before in the stream itself, and two threads that are on
            # one stream at a time would each leave it for where the other one came from.
            torch.accelerator.set_stream(stream)
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


def _has_sleeping_events(module: Any) -> bool:
    """Whether a device's module has an event of its own for which the host can sleep while it waits.

    A thread that spins instead takes a core from the updates. torch's own event takes the word (`blocking`) and does
    nothing with it.
    """
    own = getattr(module, "Event", None)
    if own is None or own is torch.Event:
        return False
    try:
        return "blocking" in inspect.signature(own).parameters
    except (TypeError, ValueError):  # of native code that does not tell
        return False
