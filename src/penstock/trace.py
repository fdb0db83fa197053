"""What submitted work is for: told to streams with each submission, shown by traces and programs of a rehearsal."""

from typing import NamedTuple


class Label(NamedTuple):
    """What a piece of work is for.

    Attributes:
        verb: what it does: `gather`, `reduce`, `update`, ...
        unit: the name of the unit that it is done to.
        kind: the kind of state, where it is not all of the unit.
        tile: the tile's number, where it is one.
    """

    verb: str = ""
    unit: str = ""
    kind: str = ""
    tile: int | None = None

    def of_tile(self, number: int | None) -> "Label":
        """Label one tile of the same work; `None` for all of it."""
        return self._replace(tile=number)

    def __str__(self) -> str:
        words = [word for word in (self.verb, self.unit, self.kind) if word]
        return " ".join(words if self.tile is None else [*words, f"tile {self.tile}"])


NO_LABEL = Label()
