"""The machine that this process runs on: probed, kept in the user's cache, and looked at for what is free now."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch.distributed as dist

from penstock.forecast.figures import Figure, write_value
from penstock.forecast.machine import Machine
from penstock.machine.devices import device_for
from penstock.probe import cache
from penstock.probe.measure import measure, measure_free

__all__ = ["as_json", "probe", "refreshed", "remember", "write_value"]


def refreshed(machine: Machine, folders: Sequence[str | PathLike[str]] = ()) -> Machine:
    """Give a machine that was probed before what is free now: memory of the device and of the host, and of folders."""
    free = measure_free(device_for((), None).device, folders)
    return replace(machine, figures={**machine.figures, **{name: Figure(*figure) for name, figure in free.items()}})


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
    measured = measure(folders=folders, seconds=seconds, progress=progress, groups=groups)
    figures = {name: Figure(*figure) for name, figure in measured.figures.items()}
    return Machine(measured.name, measured.device, figures, measured.fingerprint, probed=True)


def as_json(machine: Machine) -> str:
    """Write a machine as its file has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        machine.write(path)
        return path.read_text().rstrip()


def remember(machine: Machine) -> Path | None:
    """Keep a machine for plans, in place of what was kept.

    Returns:
        The file; `None` where the cache cannot be written.
    """
    return cache.keep(machine, machine.write)
