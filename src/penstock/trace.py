"""Labels of submitted work: passed to streams with each submission, shown by traces and simulated programs."""

from typing import NamedTuple


class Label(NamedTuple):
    """Purpose of a piece of work.

    Attributes:
        verb: the operation: `gather`, `reduce`, `update`, ...
        unit: the name of the unit.
        kind: the kind of state; empty for all of the unit.
        tile: the tile's number; `None` for all tiles.
    """

    verb: str = ""
    unit: str = ""
    kind: str = ""
    tile: int | None = None

    def of_tile(self, number: int | None) -> "Label":
        """Return the label of one tile of the same work; `None` for all tiles."""
        return self._replace(tile=number)

    def __str__(self) -> str:
        words = [word for word in (self.verb, self.unit, self.kind) if word]
        return " ".join(words if self.tile is None else [*words, f"tile {self.tile}"])


NO_LABEL = Label()
