"""The whole probe: every part in its share of a stated time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, EngineError
from penstock.planner.rates import Rate
from penstock.probe.arithmetic import measure_arithmetic, measure_device, measure_device_update, measure_host
from penstock.probe.disks import Folder, check_folders, measure_disks
from penstock.probe.fingerprint import fingerprint
from penstock.probe.links import measure_collectives, measure_jobs, measure_links, measure_room
from penstock.probe.sampling import Deadline, Figures
from penstock.runtime.control_group import DEFAULT_TIMEOUT_S, ControlGroup, control_group_of_all
from penstock.runtime.hardware import Hardware, device_for
from penstock.runtime.modes import engine_mode

LEAST_SECONDS = 1.0
#: Of the stated time: what begins before it is over ends after it.
RESERVED = 0.1


def measure(
    *,
    folders: Sequence[Folder] = (),
    seconds: float = 60.0,
    device: torch.device | None = None,
    progress: Callable[[str], None] | None = None,
    groups: Mapping[str, dist.ProcessGroup] | None = None,
    control_group: ControlGroup | None = None,
) -> tuple[Figures, dict[str, Any]]:
    """Measure this machine. Nothing is left behind: no file, memory, thread, or change of random numbers.

    With a process group all ranks call it. The first one measures the machine while the others wait, then all of them
    measure their collectives; each gets the same figures.

    Arguments:
        folders: the folders of the nvme tier, one for each disk; the first rank's.
        seconds: how long it is to take. A part that runs out of its share stops after three runs of each case, and says
            so in its figures' `how`: on a slow machine it takes longer than that.
        device: the one that computes; `None` chooses as `prepare` does.
        progress: called with what is measured next, in words.
        groups: the dimensions of a mesh, by name; `None` for the default process group, if there is one.
        control_group: the ranks, patient enough to wait for the first one; of one rank, it measures alone, whatever the
            others do. `None` for all ranks of the default process group.

    Returns:
        The figures by name, in SI units, and what tells the machine from others.

    Raises:
        ConfigError: the time is too short or no number, or a folder cannot be written or is full; on all ranks. Nothing
            was measured.

    Example:
        >>> figures, fingerprint = measure(folders=["/mnt/nvme"], seconds=20)
        >>> figures["disk_read"].value
    """
    given: Any = seconds
    if isinstance(given, bool) or not isinstance(given, int | float) or not LEAST_SECONDS <= given < inf:
        raise ConfigError(f"seconds={seconds!r} is no time to measure a machine in. Use {LEAST_SECONDS:g} or more.")
    device = device_for((), None).device if device is None else device
    say = progress or (lambda words: None)
    with ExitStack() as ending, engine_mode():
        if control_group is None:
            patience_s = max(DEFAULT_TIMEOUT_S, 2 * seconds)
            control_group = control_group_of_all(timeout_s=patience_s, error=EngineError)
            ending.callback(control_group.close)
        deadline = Deadline(seconds * (1 - RESERVED))
        # Of several ranks one measures: two at once would each find half of the memory and of the disks.
        found: list[Any] = []
        with control_group.together("probe"):
            if control_group.is_first:
                check_folders(folders)
                alone = deadline.share(0.85 if control_group.size > 1 else 1.0)
                figures = _measure_alone(device, folders, alone, say)
                found = [fingerprint(device, folders), {name: astuple(rate) for name, rate in figures.items()}]
        known, shared = control_group.share(found)
        figures = {name: Rate(*rate) for name, rate in shared.items()}
        if control_group.size > 1 and dist.group.WORLD is not None:
            say("collectives")
            every = {"all ranks": dist.group.WORLD}
            figures |= measure_collectives(device, groups or every, control_group, deadline.left())
    return dict(sorted(figures.items())), known


def _measure_alone(
    device: torch.device, folders: Sequence[Folder], deadline: Deadline, say: Callable[[str], None]
) -> Figures:
    """Measure everything but collectives: each part gets its share of the time that is left when it begins."""
    accelerator = device.type != "cpu"
    # In words, its weight, the part, and whether this machine has it. What plans rest on most comes first: a part that
    # takes longer than its share leaves less to those behind it.
    table: list[tuple[str, float, Callable[[Deadline], Figures], bool]] = [
        ("device memory", 1.0, partial(measure_device, device), True),
        ("arithmetic", 6.0, partial(measure_arithmetic, device), True),
        ("links", 5.0, partial(measure_links, device), accelerator),
        ("host memory and updates", 6.0, partial(measure_host, device), True),
        ("jobs", 0.5, partial(measure_jobs, device), True),
        ("disks", 6.0, partial(measure_disks, folders), bool(folders)),
        ("free memory", 2.0 if accelerator else 0.5, partial(measure_room, device), True),
        ("updates on the device", 4.0, partial(measure_device_update, device), accelerator),
    ]
    parts = [(words, weight, part) for words, weight, part, there in table if there]
    figures: Figures = {}
    for number, (words, weight, part) in enumerate(parts):
        say(words)
        figures |= part(deadline.share(weight / sum(other for _, other, _ in parts[number:])))
    if accelerator:
        Hardware(device).empty_cache()
    return figures
