"""The machine that is meant: one that is given, one that comes along, or this one, probed once and kept."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, EngineError, PenstockError, one_line
from penstock.planner.machine import Machine, from_probe
from penstock.planner.simulation.engine_internals import ControlGroup, control_group_of_all, device_for
from penstock.probe.disks import Folder, check_folders, free_space
from penstock.probe.fingerprint import fingerprint
from penstock.probe.links import free_memory
from penstock.probe.measure import measure

PATIENCE_S = 3600.0  # for the first rank

_logger = logging.getLogger("penstock")


def machine_for(
    machine: Machine | str | os.PathLike[str] | None, folders: Sequence[Folder] = (), *, seconds: float = 60
) -> Machine:
    """Return the machine that is meant.

    Arguments:
        machine: a machine, its file, or the name of one that comes with the package; `None` for this one, as it was
            probed before, or probed now. What is free changes all the time, and is looked at anew.
        folders: whose disks are measured, where this one is probed.
        seconds: how long probing may take.

    Raises:
        ConfigError: there is no such machine, or a folder cannot be used.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is not None:
        if not isinstance(machine, str | os.PathLike):
            raise ConfigError(f"machine is a {type(machine).__name__}. Use a Machine, a file, or a name.")
        return Machine.read(machine)
    check_folders(folders)
    device = device_for((), None).device
    path = path_of(fingerprint(device, folders))
    with contextlib.ExitStack() as held:
        # Of several processes that ask at once one measures and the others wait: two that measured the same disk at the
        # same time would each find half of it. Where no lock can be had, all measure.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(path.with_suffix(".lock").open("a")), fcntl.LOCK_EX)
        # Alone: one rank may ask for all, and ranks of one host wait here for the first of them.
        found = machine_here(device, ControlGroup(), None, folders=folders, seconds=seconds)
    assert found is not None
    return replace(found, figures={**found.figures, **free_memory(device), **free_space(folders)})


def machine_of_ranks(folders: Sequence[Folder] = ()) -> Machine | None:
    """Return the machine of the ranks of the default process group, probed before or now. Collective.

    Arguments:
        folders: the folders of the nvme tier.

    Returns:
        The machine, on the first rank; `None` on the others.

    Raises:
        ConfigError, EngineError: measuring failed on the first rank.
    """
    with contextlib.closing(control_group_of_all(timeout_s=PATIENCE_S, error=EngineError)) as control_group:
        return machine_here(device_for((), None).device, control_group, None, folders=folders)


def machine_here(
    device: torch.device,
    control_group: ControlGroup,
    groups: Mapping[str, dist.ProcessGroup] | None,
    *,
    folders: Sequence[Folder] = (),
    seconds: float = 60,
) -> Machine | None:
    """Return this machine as it was probed before, or probed now, which takes a minute. Collective.

    Arguments:
        device: the one that computes.
        control_group: the ranks, patient enough to wait for the first one, which measures the machine.
        groups: the process groups that this rank is in, one for each dimension of the mesh, by name; `None` for all
            ranks as one.
        folders: the folders of the nvme tier.
        seconds: how long measuring may take.

    Returns:
        The machine, on the first rank; `None` on the others.

    Raises:
        ConfigError, EngineError: measuring failed on the first rank, as `ControlGroup.together` says.
    """
    found: Machine | None = None
    with control_group.together("probe"):
        if control_group.is_first:
            found = _kept(fingerprint(device, folders))
            if found and control_group.size > 1 and not (found.has("link_bandwidth") or found.has("net_bandwidth")):
                found = None
    if control_group.share(found is None):
        probed = probe(folders=folders, seconds=seconds, groups=groups, device=device, control_group=control_group)
        if control_group.is_first:
            found = probed
            remember(found)
    return found


def probe(**arguments: Any) -> Machine:
    """Measure this machine, with the arguments of `penstock.probe.measure.measure`, and check its figures.

    Raises:
        ConfigError: as `Machine.probe`.
    """
    return from_probe(*measure(**arguments))


def path_of(fingerprint: Mapping[str, Any]) -> Path:
    """Return where the machine of a fingerprint is kept: below `XDG_CACHE_HOME`, or `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored: they would be another folder in each run.
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]
    return base / "penstock" / "machines" / f"{digest}.json"


def remember(machine: Machine) -> Path | None:
    """Keep a machine under its fingerprint, in place of what was kept.

    Returns:
        The file; `None` where the cache cannot be written, which the log says.
    """
    path = path_of(machine.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.write(path)
    except (PenstockError, OSError) as error:
        _logger.warning("The machine is not kept for the next time: %s", one_line(error))
        return None
    return path


def _kept(fingerprint: Mapping[str, Any]) -> Machine | None:
    """Return what is kept for a fingerprint; `None` for nothing, a damaged file, and one of another machine."""
    path = path_of(fingerprint)
    if not path.exists():
        return None
    try:
        kept = Machine.read(path)
    except (PenstockError, OSError, ValueError) as error:
        _logger.warning("This machine is probed again: what was kept of it cannot be read. %s", one_line(error))
        return None
    return kept if path_of(kept.fingerprint) == path else None
