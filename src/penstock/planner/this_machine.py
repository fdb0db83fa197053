"""The machine that this process runs on: probed once, kept in the user's cache, and read from there afterwards."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch.distributed as dist

from penstock.planner.machine import Machine, from_probe
from penstock.planner.rates import Rate, write_value
from penstock.planner.simulation.engine_internals import device_for
from penstock.probe import cache
from penstock.probe.disks import check_folders
from penstock.probe.fingerprint import fingerprint
from penstock.probe.measure import measure, measure_free

__all__ = ["Machine", "as_json", "here", "probe", "remember", "write_value"]


def here(*, folders: Sequence[str | PathLike[str]] = (), seconds: float = 60.0) -> Machine:
    """Return this machine, as it was probed before; probe it where it was not, or where it is another one now.

    What is free changes all the time, and is looked at anew.

    Arguments:
        folders: the folders of the nvme tier.
        seconds: how long a probe may take.

    Raises:
        ConfigError: a folder cannot be written or is full.
    """
    check_folders(folders)
    device = device_for((), None).device
    machine = cache.recalled(
        fingerprint(device, folders),
        read=Machine.read,
        # Alone: one rank may ask for all, and ranks of one host wait here for the first of them.
        make=lambda: probe(folders=folders, seconds=seconds, groups={}),
        write=Machine.write,
    )
    free = {name: Rate(*figure) for name, figure in measure_free(device, folders).items()}
    return replace(machine, figures={**machine.figures, **free})


def probe(
    *,
    folders: Sequence[str | PathLike[str]] = (),
    seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
    groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> Machine:
    """Measure this machine, as `Machine.probe` does, and say what is measured next.

    Arguments:
        folders: the folders of the nvme tier.
        seconds: how long it may take.
        progress: called with what is measured next, in words.
        groups: the dimensions of a mesh, whose links are measured too; `None` for the default process group, if there
            is one. Then all ranks call this. Empty where this rank measures alone.

    Raises:
        ConfigError: as `Machine.probe`.
    """
    return from_probe(*measure(folders=folders, seconds=seconds, progress=progress, groups=groups))


def as_json(machine: Machine) -> str:
    """Write a machine as its file has it, on one line."""
    return json.dumps(machine.to_dict())


def remember(machine: Machine) -> Path | None:
    """Keep a machine for `here`, in place of what was kept.

    Returns:
        The file; `None` where the cache cannot be written.
    """
    return cache.keep(machine, machine.write)
