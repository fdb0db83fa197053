"""Whose turn it is on a process group that several engines share.

Ranks match collectives by their order on the group. An engine's own have one order, that of its stream; those of two
engines are issued by two threads, so each waits for the one of another engine that was submitted before it.
"""

from weakref import WeakValueDictionary

import torch.distributed as dist

from penstock.machine.streams import DONE, Event

# A group belongs to the process, and so does the order on it. Nothing is left when the last engine is gone.
_of_groups: "WeakValueDictionary[dist.ProcessGroup, Turns]" = WeakValueDictionary()


class Turns:
    """The order on one group. Made by `turns_on` alone."""

    def __init__(self) -> None:
        self._last: Event = DONE
        self._whose: object = None

    def before(self, engine: object) -> Event:
        """The last collective of another engine: the next one of this engine is issued after it."""
        return DONE if self._whose is engine else self._last

    def submitted(self, engine: object, event: Event) -> None:
        """A collective of an engine will be issued by the time of an event."""
        self._whose, self._last = engine, event


def turns_on(group: dist.ProcessGroup) -> Turns:
    """The same object for every engine on the group."""
    turns = _of_groups.get(group)
    if turns is None:
        turns = _of_groups[group] = Turns()
    return turns
