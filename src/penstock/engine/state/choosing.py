"""Which checkpoints a path stands for: the first rank says, and all ranks go by what it says.

Each rank for itself could see another newest one: a save is over at another time for each of them, and file systems
show new files late.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.opened import stands_for
from penstock.errors import CheckpointError
from penstock.machine.collectives import Ranks


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as this rank sees it.

    Attributes:
        folder: the checkpoint's own.
        token: what the first rank has read in it.
    """

    folder: Path
    token: str

    def check(self, token: str) -> None:
        """Refuse one that is another than the first rank's."""
        if token != self.token:
            raise CheckpointError(
                f"{self.folder} is another checkpoint on this rank ({token}) than on the first ({self.token}). Give "
                "all ranks the path of one checkpoint, on a file system that they share.",
                file=str(self.folder),
                field="token",
            )


def choose(path: Path, ranks: Ranks, failure: Exception | None) -> list[Candidate]:
    """Choose the checkpoints that a path stands for, the newest first; at least one. Collective.

    Arguments:
        path: itself a checkpoint, or a folder of some, or `latest` in one.
        ranks: all ranks, which go by what the first one says.
        failure: what this rank has failed with before, for all to hear of.

    Raises:
        CheckpointError: there is none.
        EngineError: another rank has failed.
    """
    names: list[list[str]] = []
    beside = False
    if failure is None and ranks.number == 0:
        try:
            parent, found = stands_for(path)
            beside = parent != path
            names = [[name, token] for name, token in found]
        except Exception as error:
            failure = error
    ranks.council.agree(failure)  # before the names: a rank that raised alone would leave the others waiting for them
    beside, names = ranks.council.share([beside, names])
    base = path.parent if beside else path
    return [Candidate(base / name, token) for name, token in names]
