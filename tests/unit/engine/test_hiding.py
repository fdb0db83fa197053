"""Movement and updates hide behind compute: the time of steps on streams with stated bandwidths.

Compute is a sleep in each block's forward and backward; work on a stream takes bytes / bandwidth. Every case has the
serial baseline in the same run.
"""

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, FETCH, UPDATE, UPLOAD, WRITE
from tests.lib.engines import prepare_on
from tests.lib.memory import shorten_rings
from tests.support import sampled

BLOCKS, WIDTH = 8, 64
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.028  # of each block
WARM_UP, STEPS, ATTEMPTS = 1, 3, 6
MOST = 1.1  # times the longest of compute and each stream
LEAST = 0.95  # times compute and the stream one after the other: what the serial baseline takes


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(SlowBackward.apply(x))


class Stated(SimulatedStreams):
    """Streams with bandwidths, in bytes per second; those without one take no time.

    Attributes:
        busy: seconds of work by stream since it was cleared.
    """

    def __init__(self, bandwidths: dict[str, float]) -> None:
        self.busy: Counter[str] = Counter()

        def delay(stream: str, nbytes: int) -> float:
            seconds = nbytes / bandwidths[stream] if stream in bandwidths else 0.0
            self.busy[stream] += seconds
            return seconds

        super().__init__(delay)


@dataclass(frozen=True)
class Case:
    """A resource that is slow, and where the state is.

    Attributes:
        seconds: that each block takes of a stream, all its bytes of one step together.
        block_bytes: what a block moves on that stream in one step.
    """

    seconds: dict[str, float]
    block_bytes: dict[str, int]
    tiers: dict[str, str]
    overlap: str = "forward"


NUMEL = WIDTH * WIDTH
RECORD = 10 * NUMEL  # master and moments; whole pages
CASES = {
    "a slow update": Case({UPDATE: 0.012}, {UPDATE: 26 * NUMEL}, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}),
    "a slow disk": Case(
        {FETCH: 0.012, WRITE: 0.012},
        {FETCH: RECORD, WRITE: RECORD},
        {"params": "cpu", "grads": "cpu", "optimizer": "nvme"},
    ),
    "a slow link": Case(
        {UPLOAD: 0.012, DOWNLOAD: 0.012}, {UPLOAD: 2 * NUMEL, DOWNLOAD: 2 * NUMEL}, {"grads": "cpu", "optimizer": "cpu"}
    ),
    "a slow link to parameters": Case(
        {UPLOAD: 0.020}, {UPLOAD: 4 * NUMEL}, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
    ),
    "a slow update, in backward": Case(
        {UPDATE: 0.018}, {UPDATE: 26 * NUMEL}, {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}, "backward"
    ),
    "a slow disk, in backward": Case(
        {FETCH: 0.014, WRITE: 0.014},
        {FETCH: RECORD, WRITE: RECORD},
        {"params": "cpu", "grads": "cpu", "optimizer": "nvme"},
        "backward",
    ),
}


@dataclass
class Timing:
    """Of one step, in seconds: the median, and how long each slow stream worked."""

    step: float
    busy: dict[str, float]


def measure(case: Case, overlap: str, disk: Path, *, slow: bool = True, **options: Any) -> Timing:
    bandwidths = {stream: case.block_bytes[stream] / seconds for stream, seconds in case.seconds.items()}
    streams = Stated(bandwidths if slow else {})
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = penstock.Placement(**case.tiers, nvme_path=disk)
    optimizer = prepare_on(
        streams, model, stock, placement=placement, overlap=overlap, options=penstock.Options(**options)
    )
    x = torch.ones(1, WIDTH, requires_grad=True)
    times = []
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            streams.busy.clear()
        start = time.perf_counter()
        optimizer.backward(model(x).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    busy = {stream: streams.busy[stream] / STEPS for stream in case.seconds}
    optimizer.close()
    return Timing(statistics.median(times[WARM_UP:]), busy)


@pytest.mark.parametrize("name", sampled(CASES, every=6))
def test_steps_take_as_long_as_the_longest_of_compute_and_each_stream(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute is a step whose streams take no time: that of the blocks, and of the engine on the caller's thread."""
    shorten_rings(monkeypatch, slots=4)  # else every record is still in memory when it is wanted again
    case = CASES[name]
    for _ in range(ATTEMPTS):
        compute = measure(case, "none", tmp_path, slow=False).step
        serial = measure(case, "none", tmp_path, prefetch_bytes=0)
        hidden = measure(case, case.overlap, tmp_path)
        longest, total = (
            max(compute, *hidden.busy.values()),
            compute + min(serial.busy.values()),
        )  # files are written later
        assert max(hidden.busy.values()) > 0.2 * BLOCKS * (FORWARD_SECONDS + BACKWARD_SECONDS), "nothing to hide"
        found = (
            f"{name}: compute {compute:.3f} s, streams {hidden.busy}, serial {serial.step:.3f} s, {hidden.step:.3f} s"
        )
        print(found)
        if hidden.step <= MOST * longest and serial.step >= LEAST * total:
            return
    pytest.fail(found)
