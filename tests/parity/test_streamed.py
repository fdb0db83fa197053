"""Updates that are streamed through the device: the same bits as with every tile updated where its state rests."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from penstock.config import Tier
from penstock.engine.step.update import TileUpdate, Updater, _storages
from penstock.runtime.streams import DEVICE_UPDATE, UPDATE, Event, Streams, Work
from penstock.tiers import staging
from tests.lib.streams import SeparateStreams, late, separate
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, prepared, shares, train

KIB = 1 << 10
STEPS = 2
WHAT = Arithmetic(precision="bf16", accumulation=3, clip=0.5)
HALF = shares(device=0.5, cpu=0.5)
THREE_WAYS = shares(device=0.3, cpu=0.4, nvme=0.3)


def streamed(how: Movement, share: Any, **options: Any) -> Movement:
    return how.but(streamed_updates=share, **{"tile_bytes": 4 * KIB, **options})  # a block is 7 tiles in fp32


ON_CPU, IN_FILES = Movement(3, "cpu", "cpu", "cpu"), Movement(3, "nvme", "nvme", "nvme")
MOVEMENTS = (
    streamed(ON_CPU, 0.5),
    streamed(ON_CPU, "auto"),
    streamed(Movement(2, "device", "device", "cpu", "none"), 0.4),  # its parameters have a shadow on the host
    streamed(IN_FILES, 0.3, io_queue_depth=2),
    streamed(Movement(3, THREE_WAYS, HALF, THREE_WAYS, "forward"), 0.5),
    streamed(Movement(0, "cpu", "nvme", HALF), "auto", live_bytes=32 * KIB),
)


@pytest.mark.parametrize("streams", [separate, late])
def test_stretches_of_tiles_change_no_bit(streams: Callable[[], Streams], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device and the host take several tiles at once out of a ring, which small models have too few for."""
    seen: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.CPU: []}
    submit = Updater._submit

    def note(self: Updater, tile: TileUpdate, *rest: Any) -> None:
        if not self._streamers[tile.runs_on].range_at(tile.number, _storages(tile.unit, tile.number)).in_place:
            seen[tile.runs_on].append(tile.count)
        submit(self, tile, *rest)

    monkeypatch.setattr(staging, "LEAST_STRETCHES", 2)
    monkeypatch.setattr(Updater, "_submit", note)
    down, up = Movement(3, "device", "cpu", "device"), Movement(2, "device", "device", "cpu", "none")
    both = Movement(3, "cpu", "device", "cpu", "forward")
    moved = MOVEMENTS if streams is separate else MOVEMENTS[::2]
    at_once = [bits(train(WHAT, Movement(stage), steps=STEPS)) for stage in range(4)]
    for how in (*moved, *(how.but(tile_bytes=4 * KIB) for how in (down, up, both))):
        assert bits(train(WHAT, how, streams=streams(), steps=STEPS)) == at_once[how.stage], changed(how)
    assert all(max(counts) > 2 for counts in seen.values())


class Counting(SeparateStreams):
    """Counts what is submitted, by stream."""

    def __init__(self) -> None:
        super().__init__(separate().device)
        self.submitted: Counter[str] = Counter()

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        self.submitted[stream] += 1
        return super()._submit(stream, work, after, writes)


def counted(share: float, how: Movement = ON_CPU) -> Counter[str]:
    streams = Counting()
    model, optimizer = prepared(Arithmetic(clip=0.5), streamed(how, share), streams)
    for (batch,), *_ in batches(1, 1)[:2]:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return streams.submitted


def test_the_share_of_the_tiles_is_updated_on_the_device() -> None:
    assert counted(0.0)[DEVICE_UPDATE] == 0
    tiles = counted(1.0)[DEVICE_UPDATE]
    assert tiles > counted(0.0)[UPDATE], "without a share the host takes stretches of them"
    for share in (0.25, 0.5, 1.0):
        found = counted(share)
        assert found[DEVICE_UPDATE] == int(share * tiles / 2) * 2, "of each of two steps"
        assert found[DEVICE_UPDATE] + found[UPDATE] == tiles


def test_what_backward_has_begun_stays_on_the_host() -> None:
    streams = Counting()
    model, optimizer = prepared(Arithmetic(), streamed(Movement(3, "cpu", "cpu", "cpu", "backward"), 1.0), streams)
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    begun = streams.submitted[UPDATE]
    assert begun > 0
    optimizer.step()
    assert streams.submitted[DEVICE_UPDATE] == 0
    optimizer.close()
