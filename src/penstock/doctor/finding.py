"""What was found of one thing."""

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import one_line

_MOST_CHARS = 300


class Verdict(StrEnum):
    """How well something does."""

    FINE = "fine"
    SLOW = "slow"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What was found of one thing.

    Attributes:
        about: what was looked at, in a word or two.
        verdict: how well it does: `SLOW` works, `BROKEN` does not.
        found: what is there.
        mend: what to do; empty where it is fine.
    """

    about: str
    verdict: Verdict
    found: str
    mend: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return {"about": self.about, "verdict": str(self.verdict), "found": self.found, "mend": self.mend}


def fine(about: str, found: object) -> Finding:
    """Call something fine, in one line whatever the machine says."""
    return Finding(about, Verdict.FINE, one_line(str(found), _MOST_CHARS))


def slow(about: str, found: object, mend: str) -> Finding:
    """Call something slow: it works, and something would make it faster."""
    return Finding(about, Verdict.SLOW, one_line(str(found), _MOST_CHARS), mend)


def broken(about: str, found: object, mend: str) -> Finding:
    """Call something broken: it does not work, and something can be done."""
    return Finding(about, Verdict.BROKEN, one_line(str(found), _MOST_CHARS), mend)
