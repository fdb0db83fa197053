"""Which checkpoints a path stands for: the first rank says, and all ranks go by what it says.

Each rank for itself could see another newest one: a save is over at another time for each of them, and file systems
show new files late.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.checkpoint.folder import stands_for
from penstock.errors import CheckpointError
from penstock.machine.collectives import Ranks


@dataclass(frozen=True)
class Candidate:
    """A checkpoint as this rank sees it.

    Attributes:
        folder: its own.
        token: that it had for the first rank.
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


def choose(path: Path, ranks: Ranks, device: torch.device, failure: Exception | None) -> list[Candidate]:
    """The checkpoints that a path stands for, the newest first; at least one. Collective.

    Arguments:
        path: itself a checkpoint, or a folder of some, or `latest` in one.
        ranks: all of them.
        device: of their collectives.
        failure: of this rank, before.

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
    ranks.check_failures(failure, device)
    beside, names = json.loads(_share(json.dumps([beside, names]), ranks, device))
    base = path.parent if beside else path
    return [Candidate(base / name, token) for name, token in names]


def _share(text: str, ranks: Ranks, device: torch.device) -> str:
    """What the first rank has."""
    if ranks.world_size == 1:
        return text
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([own.numel()], device=device)
    ranks.broadcast(length)
    shared = own.to(device) if ranks.number == 0 else torch.empty(int(length), dtype=torch.uint8, device=device)
    ranks.broadcast(shared)
    return bytes(shared.cpu().numpy()).decode()
