r"""The state of a gathered unit, and the one count of who holds it.

    RELEASED --> GATHERING --> GATHERED --> RELEASED
    OUTDATED --^      \____________________> OUTDATED --> RELEASED

A unit is released when the last holder lets go of it, and by nobody else. Whoever uses a unit says here what happened;
nobody else writes these fields.
"""

from enum import Enum


class Residency(Enum):
    """What device memory a unit's parameters hold beside their home.

    RELEASED: none; the parameters read as NaN.
    OUTDATED: the full buffer has memory, and its values do not count: those of a resident or persistent unit from
        before an update, or NaN in a buffer that somebody else still has views of.
    GATHERING: the full buffer is being filled.
    GATHERED: the full buffer holds the values and the parameters are views of it.
    """

    RELEASED = "released"
    OUTDATED = "outdated"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Holder(Enum):
    """Who needs a unit's parameters. The values are the names of the counts.

    FORWARD: a forward of one of its anchors is under way; forwards nest.
    BACKWARD: its backward is under way.
    UNANNOUNCED: a backward may need it that nothing tells of; until that backward is over.
    BLOCK: a `gathered` block; blocks nest.
    """

    FORWARD = "forwards"
    BACKWARD = "backwards"
    UNANNOUNCED = "unannounced"
    BLOCK = "blocks"


_FOLLOWS = {
    Residency.RELEASED: {Residency.GATHERING, Residency.OUTDATED},  # outdated: memory that is lent to become a home
    Residency.OUTDATED: {Residency.GATHERING, Residency.RELEASED, Residency.OUTDATED},
    Residency.GATHERING: {Residency.GATHERED, Residency.OUTDATED, Residency.RELEASED},
    Residency.GATHERED: {Residency.OUTDATED, Residency.RELEASED},
}


class Holding:
    """Who holds one unit, and what its full buffer has.

    Attributes:
        forwards, backwards, unannounced, blocks: how many of each hold it.
        used: its parameters were there for somebody to compute with, at some time.
        empties_views: the buffer's memory goes when the unit is released, whoever has views of it. Autograd may have
            saved some where nobody saw that, or what filled the buffer has failed.
        shown: people have seen the buffer since it was filled, and may have kept views of it that are to stay good.
    """

    def __init__(self) -> None:
        self.residency = Residency.OUTDATED
        self.forwards = self.backwards = self.unannounced = self.blocks = 0
        self.used = False
        self.empties_views = False
        self.shown = False

    def become(self, residency: Residency) -> None:
        """Go on to another state, one that may follow."""
        assert residency in _FOLLOWS[self.residency], f"{self.residency.name} -> {residency.name}"
        self.residency = residency

    def take(self, holder: Holder) -> None:
        """One more of these needs the unit."""
        setattr(self, holder.value, getattr(self, holder.value) + 1)
        self.used = True
        self.shown = self.shown or holder is Holder.BLOCK

    def drop(self, holder: Holder) -> None:
        """One of them needs it no longer."""
        left = getattr(self, holder.value) - 1
        assert left >= 0, f"{holder.name} does not hold the unit"
        setattr(self, holder.value, left)

    def drop_all(self, holder: Holder) -> None:
        """None of them needs it any longer."""
        setattr(self, holder.value, 0)

    def lose_forwards(self) -> None:
        """Forwards have ended without a word, and so has what they kept for a backward that would not be announced."""
        self.drop_all(Holder.FORWARD)
        self.drop_all(Holder.UNANNOUNCED)

    def end_backward(self) -> None:
        """The backward that was under way needs it no longer, announced or not."""
        self.drop_all(Holder.BACKWARD)
        self.drop_all(Holder.UNANNOUNCED)

    def leave_blocks(self, count: int) -> None:
        """So many `gathered` blocks hold it from now on. A count, so that it can be said again after an interrupt."""
        self.blocks = count

    def note_unseen_saves(self) -> None:
        """A forward is recorded where nobody sees what autograd saves: graphs may have views of the buffer."""
        self.empties_views = True

    def forget_unseen_saves(self) -> None:
        """Backward is over, and with it the graphs that may have had views."""
        self.empties_views = False

    def note_failed_fill(self) -> None:
        """What filled the buffer has failed: nothing reads it."""
        self.empties_views = True

    def hand_to_caller(self) -> None:
        """A module has returned parameters: the memory is the caller's too."""
        self.shown = True

    def note_emptied(self) -> None:
        """What people may have kept of the buffer is theirs; the values that come next they have not seen."""
        self.shown = False

    @property
    def is_held(self) -> bool:
        """Whether anybody needs it."""
        return bool(self.forwards or self.backwards or self.unannounced or self.blocks)
