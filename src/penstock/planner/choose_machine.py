"""Which machine is meant: one that is given, one that comes with the package, or this one, probed once."""

import os
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.planner.machine import Machine
from penstock.planner.this_machine import here


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
    return here(folders=folders, seconds=seconds)
