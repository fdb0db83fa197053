"""What one rank has issued since the last step, in order: ranks compare it before anything is updated.

Collectives of equal size match on the wire whatever they are of, so ranks that run different units would exchange their
values and notice nothing.
"""

import zlib
from collections.abc import Sequence
from itertools import zip_longest

from penstock.errors import EngineError
from penstock.machine.council import Council

SAME = (
    "Every rank must run the same units in the same order. Where ranks choose what to run (experts, layers that are "
    "skipped), the choice must lie inside a unit: units=(<class of the module that chooses>,)."
)
_MOST_NOTED = 1 << 16  # names of collectives, in a long evaluation without a step


class Sequel:
    """The names of what was issued since ranks last compared it.

    Arguments:
        council: the ranks that issue the same.
    """

    def __init__(self, council: Council) -> None:
        self._council = council
        self._names: list[str] = []

    def note(self, what: str) -> int:
        """Note one more; return its number."""
        self._names.append(what)
        if len(self._names) > _MOST_NOTED:
            del self._names[: _MOST_NOTED // 2]  # at the same count on every rank
        return len(self._names)

    def digest(self) -> list[float]:
        """Return two numbers for ranks to sum, from which `check` tells whether all issued the same."""
        value = float(zlib.crc32("|".join(self._names).encode()) & 0xFFFF)  # 16 bits: sums of squares are exact
        return [value, value * value]

    def check(self, summed: Sequence[float]) -> None:
        """Compare what the ranks have issued since they last did so.

        All values are equal where n times the sum of their squares is the square of their sum.

        Arguments:
            summed: the sums over all ranks of the two numbers of `digest`.

        Raises:
            EngineError: on every rank, where ranks have issued different collectives; it names the first difference.
        """
        issued, self._names = self._names, []
        total, squares = summed
        if total * total == squares * self._council.size:
            return
        everyone = self._council.collect(issued)
        for number, names in enumerate(zip_longest(*everyone), start=1):
            if len(set(names)) > 1:
                of_ranks = zip(self._council.members, names, strict=True)
                by_rank = "; ".join(f"{self._council.named(rank)}: {name or 'none'}" for rank, name in of_ranks)
                raise EngineError(
                    f"Ranks are out of step: collective {number} since the last step was not the same on all of them "
                    f"({by_rank}). Nothing was updated. {SAME}"
                )
        raise EngineError(f"Ranks are out of step. Nothing was updated. {SAME}")
