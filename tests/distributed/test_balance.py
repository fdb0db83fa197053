"""Stage 2 with gradients on the host: in backward each rank copies its share of the bytes of every unit."""

from collections import Counter
from typing import Any

from penstock.runtime.streams import DOWNLOAD, Event, Work
from penstock.trace import Label
from tests.lib.engines import loss_of, prepared
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import SeparateStreams, separate


class Counting(SeparateStreams):
    """Counts the bytes of copies to the host, by unit."""

    def __init__(self) -> None:
        super().__init__(separate().device)
        self.downloaded: Counter[str] = Counter()

    def submit(self, stream: str, work: Work, *, label: Label, **rest: Any) -> Event:
        if stream == DOWNLOAD:
            self.downloaded[label.unit] += rest["nbytes"]
        return super().submit(stream, work, label=label, **rest)


def shares(rank: int, world_size: int) -> None:
    streams = Counting()
    model, optimizer = prepared(Blocks, streams, stage=2, precision="bf16", grads="cpu", optimizer="cpu")
    expected = {unit.name: unit.nbytes // world_size for unit in optimizer._engine.context.units}
    seen: list[int] = []
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append(len(streams.downloaded)))
    for number in range(2):
        streams.downloaded.clear()
        optimizer.backward(loss_of(model, number))
        assert dict(streams.downloaded) == expected, "all of it by the end of backward"
        optimizer.step()
        optimizer.zero_grad()
    assert min(seen) > 0, "what comes after a block is on its way while the block's gradients are computed"
    optimizer.close()


def test_every_rank_copies_its_share_of_each_units_gradient_in_backward() -> None:
    run_ranks(shares, 4, 4)
