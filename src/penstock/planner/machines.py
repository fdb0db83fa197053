"""Which machine is meant: one that is given, one that comes with the package, or this one, probed once."""

import os
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.forecast.machine import Machine
from penstock.machine.devices import device_for
from penstock.planner.probing import probe, refreshed
from penstock.probe.cache import recalled
from penstock.probe.disks import check_folders
from penstock.probe.fingerprint import fingerprint


def machine_for(
    machine: Machine | str | os.PathLike[str] | None,
    folders: Sequence[str | os.PathLike[str]] = (),
    *,
    seconds: float = 60,
) -> Machine:
    """Give the machine that is meant.

    Arguments:
        machine: a machine, its file, or the name of one that comes with the package; `None` for this one.
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
    found = recalled(
        fingerprint(device_for((), None).device, folders),
        read=Machine.read,
        # Alone: one rank may ask for all, and ranks of one host wait here for the first of them.
        make=lambda: probe(folders=folders, seconds=seconds, groups={}),
        write=Machine.write,
    )
    return refreshed(found, folders)
