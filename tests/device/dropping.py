"""An accelerator's streams that can leave out one of the engine's waits."""

import torch

from penstock.runtime.accelerator import AcceleratorStreams
from tests.parity.waits import NotedWaits


class DroppingStreams(NotedWaits, AcceleratorStreams):
    """Streams whose waits are known by their place.

    Arguments:
        dropped: `file:line` of the wait that is left out, with `#index` for an entry of `after`.
    """

    def __init__(self, device: torch.device, dropped: str | None = None) -> None:
        super().__init__(device)
        self.dropped, self.seen = dropped, set()
