"""A run that is asked to end, by a scheduler of preemptible machines or by a launcher, saves first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from penstock.cli.training.ranks import Ranks

#: The exit status of a run that was asked to end and can be resumed: `EX_TEMPFAIL` of sysexits(3), "try again".
EXIT_INTERRUPTED = 75

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Whether any rank was asked to end."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The handler: the step that is being made is finished."""
        del number, frame
        self._asked = True

    def is_asked(self) -> bool:
        """The same answer on every rank. Collective."""
        return bool(self._ranks.sum(torch.tensor(float(self._asked))) > 0)


@contextmanager
def interruptible(ranks: Ranks) -> Iterator[Interruption]:
    """Take note of the signals that ask to end, instead of ending."""
    interruption = Interruption(ranks)
    before = {number: signal.signal(number, interruption.ask) for number in SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
