"""All looks, one after the other."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike

from penstock.doctor import memory, software
from penstock.doctor.disks import disks
from penstock.doctor.finding import Finding, slow
from penstock.errors import one_line

LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    software.versions,
    software.devices,
    software.processor,
    memory.cores,
    memory.numa,
    memory.memory,
    memory.huge_pages,
    memory.locked_memory,
    memory.shared_memory,
    memory.open_files,
    memory.allocator,
)


def examine(folders: Sequence[str | PathLike[str]] = ()) -> list[Finding]:
    """Look at this machine: whether it is fit to train on, what is slow on it, and how to mend it.

    Arguments:
        folders: the folders of the nvme tier.

    Returns:
        What was found, in a reader's order. A look that fails is a finding too.

    Example:
        >>> [finding.about for finding in examine() if finding.verdict is Verdict.BROKEN]
        []
    """
    found: list[Finding] = []
    looks: list[Callable[[], Iterator[Finding]]] = [*LOOKS, partial(disks, folders)]
    for look in looks:
        try:
            found.extend(look())
        except Exception as error:  # of a machine that nobody has seen: the other looks are what is wanted
            name = getattr(look, "__name__", "disks").replace("_", " ")
            found.append(slow(name, f"could not be looked at: {one_line(error)}", "Tell us, with this output."))
    return found
