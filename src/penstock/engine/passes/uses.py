"""The forwards that backward comes back to, on this rank or on others.

All ranks run the same units in the same order, and each goes its own way inside of them: other experts, or no parameter
at all. The backward of a forward that made nothing here is not announced here, while on another rank it may be. It is
due where that rank comes to it: after what ran later, before what ran earlier.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.units.unit import Unit


@dataclass(eq=False)
class Use:
    """A forward whose backward will be announced.

    Attributes:
        units: the units of its anchor.
        silent: the units of each forward between this one and the next whose backward will not be announced.
    """

    units: Sequence[Unit]
    silent: list[Sequence[Unit]] = field(default_factory=list)


class Uses:
    """Notes forwards as they end, and says where the silent ones have their turn in backward."""

    def __init__(self) -> None:
        self._first = self._last = Use(())
        self._reached: set[Use] = set()  # in this backward
        self._open: Counter[Unit] = Counter()  # forwards since the last backward that it has not come back to

    def note(self, units: Sequence[Unit]) -> Use:
        """Note that a forward has ended whose backward will be announced; return what it is announced by."""
        self._last = Use(units)
        self._add(units, 1)
        return self._last

    def note_silent(self, units: Sequence[Unit]) -> None:
        """Note that a forward has ended that made nothing with a backward."""
        self._last.silent.append(units)
        self._add(units, 1)

    def reach(self, use: Use) -> list[Sequence[Unit]]:
        """Note that a backward is announced; return the units of silent forwards whose turn is before it, in order."""
        if use in self._reached:
            return []
        self._reached.add(use)
        self._add(use.units, -1)
        return self._take_turns(use)

    def end(self) -> list[Sequence[Unit]]:
        """Return, at the end of backward, the units of the silent forwards that ran before all others."""
        return self._take_turns(self._first)

    def is_last(self, unit: Unit) -> bool:
        """Whether backward has come back to every forward of the unit."""
        return self._open[unit] <= 0

    def clear(self) -> None:
        """Forget every forward: backward is over."""
        self._first = self._last = Use(())
        self._reached.clear()
        self._open.clear()

    def _add(self, units: Sequence[Unit], count: int) -> None:
        for unit in units:  # by hand: a counter's own methods look first at what they are given, and mostly it is one
            self._open[unit] += count

    def _take_turns(self, use: Use) -> list[Sequence[Unit]]:
        for units in use.silent:
            self._add(units, -1)
        return use.silent[::-1]
