"""What tells the hosts of a job apart, and how messages name them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import one_line

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the kernel: two machines of one name have two; Linux only
_MOST_CHARS = 64  # of a name, as the kernel takes them; another rank may say anything


class Host(NamedTuple):
    """A machine or a container, as its ranks tell it to others.

    Attributes:
        name: its host name.
        boot: what containers of one machine have in common, and two machines do not.
    """

    name: str
    boot: str = ""


def this_host() -> Host:
    """Say which host this process is on."""
    return Host(host_name(), boot_id())


def boot_id(file: Path = BOOT_ID) -> str:
    """Return what the kernel calls its start; empty where it does not say.

    Arguments:
        file: where it says so.
    """
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def host_name() -> str:
    """Return the name of this host, in one line, for messages."""
    return one_line(os.uname().nodename, _MOST_CHARS)


def names_of_hosts(said: Sequence[bytes]) -> Sequence[str]:
    """Read the names that ranks have said their hosts have.

    Arguments:
        said: one for each rank.

    Returns:
        A name for each rank; nothing where all are on one host, whose name tells a reader nothing.
    """
    names = [one_line(name.decode(errors="replace"), _MOST_CHARS) for name in said]
    return names if len(set(names)) > 1 else ()
