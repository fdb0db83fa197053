r"""The state of a gathered unit, and the one count of who holds it.

    RELEASED --> GATHERING --> GATHERED --> RELEASED
    OUTDATED --^      \____________________> OUTDATED --> RELEASED

A unit is released when the last holder lets go of it, and by nobody else. Whoever uses a unit says here what happened;
nobody else writes these fields.
"""

from enum import Enum


class Residency(Enum):
    """What device memory a unit's parameters hold beside their home.

    RELEASED: none; the parameters refuse to be read.
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
        used: whether its parameters were ever there for somebody to compute with.
        empties_views: whether the buffer's memory goes when the unit is released, whoever has views of it. Autograd may
            have saved some where nobody saw that, or what filled the buffer has failed.
        shown: whether people have seen the buffer since it was filled: views that they may have kept are to stay good.
    """

    def __init__(self) -> None:
        self.residency = Residency.OUTDATED
        self.forwards = self.backwards = self.unannounced = self.blocks = 0
        self.used = False
        self.empties_views = False
        self.shown = False

    def become(self, residency: Residency) -> None:
        """Go on to another state, one that may follow."""
        # A step that may not follow means that a unit is released under a reader, or gathered twice into one buffer.
        assert residency in _FOLLOWS[self.residency], f"{self.residency.name} -> {residency.name}"
        self.residency = residency

    def take(self, holder: Holder) -> None:
        """Count one more holder of this kind: the unit stays gathered until it lets go."""
        name = holder._value_  # `value` is a property, which takes longer than all the rest
        setattr(self, name, getattr(self, name) + 1)
        self.used = True
        self.shown = self.shown or holder is Holder.BLOCK

    def drop(self, holder: Holder) -> None:
        """Count one holder of this kind less. Whoever was the last of all has the unit released after this."""
        name = holder._value_
        left = getattr(self, name) - 1
        assert left >= 0, f"{holder.name} does not hold the unit"
        setattr(self, name, left)

    def drop_all(self, holder: Holder) -> None:
        """Forget every holder of this kind: none of them needs the unit any longer."""
        setattr(self, holder._value_, 0)

    def lose_forwards(self) -> None:
        """Forget the forwards, which ended without a word, and what they kept for a backward that nothing announces."""
        self.drop_all(Holder.FORWARD)
        self.drop_all(Holder.UNANNOUNCED)

    def end_backward(self) -> None:
        """Forget the backward that was under way, whether it was announced or not: it needs the unit no longer."""
        self.drop_all(Holder.BACKWARD)
        self.drop_all(Holder.UNANNOUNCED)

    def leave_blocks(self, count: int) -> None:
        """Set how many `gathered` blocks hold the unit from now on."""
        # The number that is left, and not one less: a block that an interrupt stopped in here may say it again.
        self.blocks = count

    def note_unseen_saves(self) -> None:
        """Note that graphs may have views of the buffer: a forward was recorded where nobody sees what is saved."""
        self.empties_views = True

    def forget_unseen_saves(self) -> None:
        """Note that backward is over, and with it the graphs that may have had views of the buffer."""
        self.empties_views = False

    def note_failed_fill(self) -> None:
        """Note that what filled the buffer has failed, so that its memory goes: nothing reads it."""
        self.empties_views = True

    def hand_to_caller(self) -> None:
        """Note that a module has returned parameters: views of the buffer are the caller's, and have to stay good."""
        self.shown = True

    def note_emptied(self) -> None:
        """Note that the buffer was emptied: nobody has seen the values that come next."""
        self.shown = False

    @property
    def is_held(self) -> bool:
        """Whether anybody needs it."""
        return bool(self.forwards or self.backwards or self.unannounced or self.blocks)
