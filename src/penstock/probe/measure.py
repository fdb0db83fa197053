"""The whole probe: every part in its share of a stated time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError
from penstock.probe.arithmetic import measure_arithmetic, measure_passes
from penstock.probe.collectives import measure_collectives
from penstock.probe.disks import Folder, check_folders, free_space, measure_disks
from penstock.probe.fingerprint import fingerprint, machine_name
from penstock.probe.links import measure_links
from penstock.probe.memory import free_memory, measure_host, measure_jobs, measure_room
from penstock.probe.sampling import Deadline, Measurement
from penstock.probe.updates import measure_device_update
from penstock.runtime.control_group import ControlGroup
from penstock.runtime.hardware import Hardware, device_for, visible_devices
from penstock.runtime.modes import engine_mode

LEAST_SECONDS = 1.0
#: Of the stated time: what begins before it is over ends after it.
RESERVED = 0.1
DEVICE_UPDATE_BYTES = 256 << 20

Figures = dict[str, Measurement]


@dataclass(frozen=True)
class Measured:
    """A machine, as it was measured.

    Attributes:
        name: what it is called: its accelerators and its processor.
        device: the type of the one that computes: "cpu", "cuda", ...
        figures: by name, in SI units.
        fingerprint: what tells it from other machines.
    """

    name: str
    device: str
    figures: dict[str, Measurement]
    fingerprint: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        """Give the four of them, to be unpacked."""
        return iter((self.name, self.device, self.figures, self.fingerprint))


def measure(
    *,
    folders: Sequence[Folder] = (),
    seconds: float = 60.0,
    device: torch.device | None = None,
    progress: Callable[[str], None] | None = None,
    groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> Measured:
    """Measure this machine. Nothing is left behind: no file, memory, thread, or change of random numbers.

    With a process group all ranks call it. The first one measures the machine while the others wait, then all of them
    measure their collectives; each gets the same figures.

    Arguments:
        folders: the folders of the nvme tier, one for each disk.
        seconds: how long it is to take. A part that runs out of its share stops after three runs of each case, and says
            so in its figures' `how`: on a slow machine it takes longer than that.
        device: the one that computes; `None` chooses as `prepare` does.
        progress: called with what is measured next, in words.
        groups: the dimensions of a mesh, by name; `None` for the default process group, if there is one. Empty where
            this rank measures alone, whatever the others do.

    Returns:
        The machine.

    Raises:
        ConfigError: the time is too short or no number, or a folder cannot be written or is full; on all ranks. Nothing
            was measured.

    Example:
        >>> measured = measure(folders=["/mnt/nvme"], seconds=20)
        >>> measured.figures["disk_read"].value
    """
    if not _is_number(seconds):
        raise ConfigError(f"seconds={seconds!r} is not a time. Use a number, {LEAST_SECONDS:g} or more.")
    if seconds < LEAST_SECONDS:
        raise ConfigError(f"seconds={seconds:g} is too short to measure a machine. Use {LEAST_SECONDS:g} or more.")
    device = device_for((), None).device if device is None else device
    say = progress or _say_nothing
    with _control_group(groups) as control_group, engine_mode():
        deadline = Deadline(seconds * (1 - RESERVED))
        alone = deadline.share(0.85 if control_group.size > 1 else 1.0)
        with control_group.together("probe"):
            if control_group.is_first:
                check_folders(folders)
        # Of several ranks one measures: two at once would each find half of the memory and of the disks.
        failure: Exception | None = None
        said: list[Any] = []
        try:
            if control_group.is_first:
                found = _measure_alone(device, folders, alone, say)
                said = [fingerprint(device, folders), found]
        except Exception as error:
            failure = error
        control_group.agree(failure, "probe")
        known, shared = control_group.share(said)
        figures = {name: Measurement(*figure) for name, figure in shared.items()}
        if control_group.size > 1 and (world := dist.group.WORLD) is not None:
            say("collectives")
            named = groups or {"all ranks": world}
            figures |= measure_collectives(device, named, control_group, deadline)
    return Measured(machine_name(known), device.type, dict(sorted(figures.items())), known)


def _measure_alone(
    device: torch.device, folders: Sequence[Folder], deadline: Deadline, say: Callable[[str], None]
) -> Figures:
    """Measure everything but collectives: each part gets its share of the time that is left when it begins.

    What plans rest on most comes first: a part that takes longer than its share leaves less to those behind it.
    """
    accelerator = device.type != "cpu"
    parts: list[tuple[str, float, Callable[[Deadline], Figures]]] = [
        ("device memory", 1.0, partial(measure_passes, device))
    ]
    if accelerator:
        parts.append(("updates on the device", 4.0, partial(_device_update, device, deadline)))
    parts.append(("arithmetic", 6.0, partial(measure_arithmetic, device)))
    if accelerator:
        parts.append(("links", 5.0, partial(measure_links, device)))
    parts.append(("host memory and updates", 6.0, partial(measure_host, device)))
    parts.append(("jobs", 0.5, partial(measure_jobs, device)))
    if folders:
        parts.append(("disks", 6.0, partial(measure_disks, folders)))
    parts.append(("free memory", 2.0 if accelerator else 0.5, partial(measure_room, device)))
    figures: Figures = {}
    for number, (what, weight, part) in enumerate(parts):
        say(what)
        figures |= part(deadline.share(weight / sum(other for _, other, _ in parts[number:])))
    update = "device_update" if "device_update" in figures else "device_bandwidth" if accelerator else "update"
    figures["device_update"] = figures[update]
    if update == "device_bandwidth":
        how = f"no time to compile an update, which reads and writes once: as {figures[update].how}"
        figures["device_update"] = figures[update]._replace(how=how)
    visible = visible_devices()
    if visible is not None and accelerator:
        figures["devices"] = Measurement(*(float(visible.count),) * 3, "that this process sees")
        Hardware(device).empty_cache()
    return figures


def measure_free(device: torch.device, folders: Sequence[Folder] = ()) -> Figures:
    """Say what is free now: `device_memory`, `host_memory`, and `disk_free` with folders. Takes no time."""
    return {**free_memory(device), **free_space(folders)}


def _device_update(device: torch.device, whole: Deadline, own: Deadline) -> Figures:
    """Measure the update on an accelerator; nothing where the whole probe has no time to compile it."""
    found = measure_device_update(device, DEVICE_UPDATE_BYTES, whole, own)
    return {} if found is None else {"device_update": found}


@contextmanager
def _control_group(groups: Mapping[str, dist.ProcessGroup] | None) -> Iterator[ControlGroup]:
    """Meet the other ranks, where there are some and they are to take part."""
    alone = groups is not None and not groups
    members: tuple[int, ...] = (0,)
    number = 0
    if not alone and dist.is_available() and dist.is_initialized():
        members, number = tuple(range(dist.get_world_size())), dist.get_rank()
    control_group = ControlGroup(members, number)
    try:
        yield control_group
    finally:
        control_group.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _say_nothing(words: str) -> None:
    """Show no progress."""
