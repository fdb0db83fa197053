"""A chart as a value: what plotly draws, with tones in the place of colours, and the table of the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Sequence[object]


#: Sizes as people write them, the largest first.
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def unit_of(most: float) -> tuple[str, int]:
    """Choose the unit of an axis of bytes, by the largest value on it."""
    return next((unit for unit in _UNITS if most >= 2 * unit[1]), _UNITS[-1])


@dataclass(frozen=True)
class Table:
    """Rows of texts under heads; the first column names the row."""

    heads: Row
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        id: its name in the page.
        title: what it shows.
        traces: plotly's, where `tone` is the number of a colour that the page has for light and dark.
        layout: plotly's, over the page's own.
        notes: sentences below the title.
        table: the same for people who cannot see it.
        is_wide: whether it takes the whole width.
        height: in pixels.
    """

    id: str
    title: str
    traces: Sequence[dict[str, Any]]
    table: Table
    layout: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    is_wide: bool = False
    height: int = 300

    def to_dict(self) -> dict[str, Any]:
        """List what the page's script reads."""
        return {"id": self.id, "traces": list(self.traces), "layout": self.layout}
