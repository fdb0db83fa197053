"""Accelerators: which device a rank computes on, its streams, its events and its clock."""

import contextlib
import inspect
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.runtime.system import BOOT_ID, boot_id

# ----------------------------------------------------------------------------------------------------------------------
# What streams and clocks ask of an accelerator: streams, events, and which of its streams a thread is on.
#
# All of it comes from the device's module (`torch.cuda`, `torch.xpu`, ...), whose streams and events belong together:
# torch takes an event of `torch.Event` for one of the module without an error. A thread's current device and current
# stream are its own: a new thread is on the first device, on its default stream.
# ----------------------------------------------------------------------------------------------------------------------


#: Set to 1 in the environment, a thread that waits for a CUDA event spins on a core of its own.
SPINNING_EVENTS = "PENSTOCK_SPINNING_EVENTS"


class Hardware:
    """One device, as streams use it.

    Of the streams and events that it makes, these methods are used: `event.record(stream)`, `event.wait(stream)`,
    `event.query()`, `event.synchronize()`, `event.elapsed_time(event)`.

    Arguments:
        device: an accelerator, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._sleeps = _has_sleeping_events(self._module)
        self.device = device
        self._compute: Any = None  # the stream that compute was on last

    def make_stream(self) -> Any:
        """Make a stream."""
        with self._module.device(self.device):
            return self._module.Stream()

    def make_event(self, *, timing: bool = False) -> Any:
        """Make an event. It is over as long as nothing was recorded.

        Arguments:
            timing: whether the event notes when the device came to it.
        """
        # The host sleeps, and a core stays free, unless its wake-up is too long to wait for.
        options = {"blocking": os.environ.get(SPINNING_EVENTS) != "1"} if self._sleeps else {}
        return self._module.Event(enable_timing=timing, **options)  # said: the default of `enable_timing` has changed

    def current(self) -> Any:
        """Return the stream of the device that the calling thread is on."""
        return self._module.current_stream(self.device)

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
        """Make the device and one of its streams current in the calling thread, inside of a `with` block."""
        with self._module.device(self.device), self._module.stream(stream):
            yield

    def synchronize(self) -> None:
        """Block until all work of the device is over."""
        self._module.synchronize(self.device)

    def empty_cache(self) -> None:
        """Return memory that torch caches to the device."""
        with self._module.device(self.device):
            self._module.empty_cache()


def _has_sleeping_events(module: Any) -> bool:
    """Return True if the events of a device's module let the host sleep while it waits (`blocking`).

    A thread that spins takes a core from the updates. `torch.Event` accepts the argument and ignores it.
    """
    if module.Event is torch.Event:
        return False
    try:
        return "blocking" in inspect.signature(module.Event).parameters
    except (TypeError, ValueError):  # of native code that does not tell
        return False


# ----------------------------------------------------------------------------------------------------------------------
# Clocks of traces: of the host, and of a device, which runs work later than the host enqueues it.
# ----------------------------------------------------------------------------------------------------------------------


class Clock:
    """Marks points in the order of work, and returns when they were reached.

    This class is the clock of work that is over when its call returns: a mark is the time.

    Attributes:
        on_host: True for a clock of the host's own work.
    """

    on_host = True

    def mark(self) -> Any:
        """Return a mark of the point at which all work that the calling thread has issued is over. Never blocks."""
        return time.monotonic()

    def seconds(self, mark: Any) -> float | None:
        """Return when a mark was reached, in seconds of `time.monotonic`; `None` if it was not reached yet."""
        return float(mark)

    def synchronize(self) -> None:
        """Block until every mark is reached."""


class DeviceClock(Clock):
    """The clock of a device's streams: a mark is an event, timed against one that the host has waited for.

    Arguments:
        hardware: the device. The constructor waits until it is idle.
    """

    on_host = False

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        hardware.synchronize()
        self._origin = self.mark()
        # The device is idle, so it comes to this event at once and the host returns with it: both times are of one
        # moment. With work before it, what the host reads afterwards would be late by as much as it takes to wake up.
        self._origin.synchronize()
        self._origin_seconds = time.monotonic()

    def mark(self) -> Any:
        """Record an event on the calling thread's current stream."""
        event = self._hardware.make_event(timing=True)
        event.record(self._hardware.current())
        return event

    def seconds(self, mark: Any) -> float | None:
        """Return when the device reached a mark, by its own timing; `None` if it was not reached yet."""
        if not mark.query():
            return None
        return self._origin_seconds + float(self._origin.elapsed_time(mark)) / 1e3

    def synchronize(self) -> None:
        """Block until all work of the device is over."""
        self._hardware.synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# The device of a rank, and the check that no other rank has the same one: for every accelerator of torch.
#
# A launcher starts a process for each device and sets its number in `LOCAL_RANK`. torch's current device is the first
# one by default. A device that the user has chosen comes before that number.
# ----------------------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Visible:
    """The accelerator's devices that this process sees.

    Attributes:
        type: their type, as in `torch.device`.
        count: how many there are.
        current: the index of torch's current one.
    """

    type: str
    count: int
    current: int


class DeviceChoice(NamedTuple):
    """A device, and why it was taken: for messages."""

    device: torch.device
    why: str = ""


def default_device() -> torch.device:
    """Return the accelerator's current device where there is one, else the cpu."""
    visible = visible_devices()
    return CPU if visible is None else torch.device(visible.type, visible.current)


def visible_devices() -> Visible | None:
    """Ask torch which accelerator it sees; `None` where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return Visible(accelerator.type, torch.accelerator.device_count(), torch.accelerator.current_device_index())


def choose_device(
    visible: Visible | None,
    *,
    model: torch.device | None = None,
    bound: torch.device | None = None,
    local_rank: str | None = None,
) -> DeviceChoice:
    """Choose the device of this rank, of what is known about it.

    What the user has said comes first: where the model lies, what the process group is bound to, a current device that
    is not the first one. Then comes the launcher's number.

    Arguments:
        visible: the accelerator's devices; without any the cpu is chosen.
        model: the device that all parameters lie on, if they lie on one.
        bound: the device that the process group is bound to, if it is bound.
        local_rank: `LOCAL_RANK` as a launcher sets it.

    Raises:
        ConfigError: the model lies on another device than the one that the process group is bound to.
    """
    if visible is None:
        return DeviceChoice(CPU)
    model, bound = _indexed(model, visible), _indexed(bound, visible)
    if model is not None and bound is not None and model != bound:
        raise ConfigError(
            f"The model lies on {model}, and the process group is bound to {bound}. Move the model there, leave it on "
            f"the cpu, or call init_process_group(device_id={model!r})."
        )
    if model is not None:
        return DeviceChoice(model, "the model lies there")
    if bound is not None:
        return DeviceChoice(bound, "the process group is bound to it")
    # Only a user makes another device than the first one current, and that comes before the launcher's number. A
    # launcher that shows each rank its own device alone counts ranks all the same: that one is number 0.
    number = (local_rank or "").strip()
    if visible.current == 0 and number.isdigit() and int(number) < visible.count:
        return DeviceChoice(torch.device(visible.type, int(number)), f"LOCAL_RANK={number}")
    return DeviceChoice(torch.device(visible.type, visible.current), "it is the current device")


def device_for(
    parameters: Iterable[Tensor], mesh: DeviceMesh | None, environment: Mapping[str, str] = os.environ
) -> DeviceChoice:
    """Choose the device of this rank, by what model, mesh, process group, torch and the launcher say.

    Arguments:
        parameters: the parameters of the model.
        mesh: the user's mesh; one of cpus takes the cpu.
        environment: the variables that may hold `LOCAL_RANK`.

    Raises:
        ConfigError: model and process group contradict each other; see `choose_device`.
    """
    if mesh is not None and mesh.device_type == "cpu":
        return DeviceChoice(CPU)
    # Parameters on several devices, or on none that is an accelerator's, say nothing of the rank's device.
    lies_on = {parameter.device for parameter in parameters}
    return choose_device(
        visible_devices(),
        model=lies_on.pop() if len(lies_on) == 1 else None,
        bound=_bound_device(mesh),
        local_rank=environment.get("LOCAL_RANK"),
    )


def make_current(device: torch.device) -> None:
    """Make a device torch's current one, so that what names no index goes there too."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def free_device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device that this process can still have; `None` where nothing says how many.

    That is what is free there, and what torch keeps for reuse in this process, within
    `torch.cuda.set_per_process_memory_fraction`.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if device == torch.device(device.type):  # torch has the fraction of a numbered device alone
        device = torch.device(device.type, torch.accelerator.current_device_index())
    ask = getattr(module, "mem_get_info", None) or getattr(torch.accelerator, "get_memory_info", None)
    try:
        free, total = map(int, ask(device))  # type: ignore[misc]
    except Exception:  # code of the device's module, which may not support it
        return None
    kept = 0
    with contextlib.suppress(Exception):
        reserved = int(module.memory_reserved(device))
        kept = reserved - int(module.memory_allocated(device))
        free = max(0, min(free, int(module.get_per_process_memory_fraction(device) * total) - reserved))
    return free + max(0, kept)


def shares_host_memory(device: torch.device) -> bool:
    """Return True if a device's memory is the host's: a cpu, or an accelerator without memory of its own.

    The free memory that such an accelerator reports leaves out the page cache; the host's own account includes it.
    """
    if device.type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device).get_device_properties(device).is_integrated)
    except Exception:  # where a device does not tell, it says so in a way of its own
        return False


def _bound_device(mesh: DeviceMesh | None) -> torch.device | None:
    """Return the device that the process groups of a mesh, or the default one, are bound to, if it is one."""
    if mesh is not None:
        groups: list[dist.ProcessGroup | None] = [*mesh.get_all_groups()]
    elif dist.is_available() and dist.is_initialized():
        groups = [dist.group.WORLD]
    else:
        groups = []
    found = {getattr(group, "bound_device_id", None) for group in groups} - {None}
    return found.pop() if len(found) == 1 else None


def _indexed(device: torch.device | None, visible: Visible) -> torch.device | None:
    """Return a device of the accelerator with its index; `None` for any other."""
    if device is None or device.type != visible.type:
        return None
    return torch.device(device.type, visible.current) if device == torch.device(device.type) else device


class HardwarePlace(NamedTuple):
    """Identity of a rank's device, in strings that JSON can carry.

    Attributes:
        name: the device, as its rank calls it: "cuda:0".
        host: the name of the host or container.
        machine: an identity that containers of one machine have in common.
        unique: the device's own identity (its UUID), or nothing where it has none.
        view: the variables that say which devices the process sees.
        why: why the rank has taken it, for messages.
    """

    name: str
    host: str
    machine: str
    unique: str
    view: str
    why: str

    def is_that_of(self, other: "HardwarePlace") -> bool:
        """Return True if two ranks have taken one device."""
        seen_alike = (self.host, self.machine, self.view) == (other.host, other.machine, other.view)
        # First by name: parts of one piece of hardware that are counted as devices have one identity.
        if seen_alike and self.name != other.name:
            return False
        if self.unique and other.unique:
            return (self.machine, self.unique) == (other.machine, other.unique)
        return seen_alike


def place_of(
    choice: DeviceChoice, environment: Mapping[str, str] = os.environ, boot_file: Path = BOOT_ID
) -> tuple[str, ...] | None:
    """Describe a device to the other ranks, as the values of a `HardwarePlace`; `None` for a cpu, which ranks share."""
    device = choice.device
    if device.type == "cpu":
        return None
    machine = boot_id(boot_file) or platform.node()
    unique = ""
    with contextlib.suppress(Exception):  # where a device has none, its module says so in a way of its own
        unique = str(torch.get_device_module(device).get_device_properties(device).uuid)
    words = ("_VISIBLE_DEVICES", "_VISIBLE_MODULES", "_AFFINITY_MASK")
    view = [f"{name}={value}" for name, value in sorted(environment.items()) if name.endswith(words)]
    return HardwarePlace(str(device), platform.node(), machine, unique, " ".join(view), choice.why)


def check_apart(places: Sequence[Sequence[str] | None], members: Sequence[int]) -> None:
    """Refuse devices that several ranks have taken.

    Arguments:
        places: what `place_of` returned on each rank.
        members: the ranks' numbers, in the same order.

    Raises:
        ConfigError: two ranks or more have one device; the message names all of them.
    """
    found = {rank: HardwarePlace(*said) for rank, said in zip(members, places, strict=True) if said is not None}
    # Compared pair by pair: two places of one device need not be equal.
    groups = [tuple(rank for rank, other in found.items() if other.is_that_of(place)) for place in found.values()]
    sharing = [ranks for ranks in dict.fromkeys(groups) if len(ranks) > 1]
    if sharing:
        described = "; ".join(_describe({rank: found[rank] for rank in ranks}) for ranks in sharing)
        raise ConfigError(
            f"Ranks share a device: {described}. Each needs one of its own: start as many "
            "ranks as there are devices, with a launcher that sets LOCAL_RANK (torchrun), and leave the model on the "
            "cpu or move it to the rank's own device; or name that one, init_process_group(device_id=...)."
        )


def _describe(sharing: Mapping[int, HardwarePlace]) -> str:
    """Describe the ranks that have one device, and the device."""
    first = next(iter(sharing.values()))
    ranks = ", ".join(f"{rank} ({place.name}: {place.why})" for rank, place in sharing.items())
    return f"ranks {ranks} on {first.host}{f', {first.unique}' if first.unique else ''}"
