"""Times on paper against the clock: engines on streams that sleep as long as their bytes take."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn

import penstock
from penstock.forecast.program import Program
from penstock.forecast.retime import retime
from penstock.machine.simulated import SimulatedStreams
from penstock.trace import Timeline
from tests.noted import TICK_SECONDS, NotingRecorder, delays
from tests.paper import Rates
from tests.support import disks, prepare_on

STEPS = 3
WIDTH = 64
#: Of one unit of the model every stream moves a few KiB: some milliseconds.
SLOW = {"upload": 1.2e6, "download": 1.2e6, "update": 5e6, "read": 2.5e6, "fetch": 2.5e6, "write": 2.5e6}
#: What else the streams may do, and how far off the paper may be when other programs run beside.
BANDWIDTHS = {
    "slow": SLOW,
    "link": SLOW | {"upload": 0.6e6, "download": 0.6e6},
    "update": SLOW | {"update": 1.6e6},
    "disk": SLOW | {"read": 1e6, "fetch": 1e6, "write": 1e6},
}
PLACEMENTS = {
    "host": penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
    "files": penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path=disks()[0]),
}
TOLERANCE = 0.25


class Seen(NamedTuple):
    """A run.

    Attributes:
        program: what it did.
        step_s: seconds of a step, without the first.
        job_s: seconds that a piece of work took beside its sleep, on average: waking up where others run as well, and
            the work itself, which is small. It is the one figure that the paper takes from the run that it is held to.
    """

    program: Program
    step_s: float
    job_s: float


@cache
def run(placement: str, name: str) -> Seen:
    """Train a little, and note it."""
    bandwidths = BANDWIDTHS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    streams = SimulatedStreams(delays(bandwidths))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = penstock.Options(tile_bytes=4096, prefetch_bytes=1 << 14)
    prepared = prepare_on(streams, model, optimizer, placement=PLACEMENTS[placement], options=options)
    batch = torch.randn(4, WIDTH)
    notes = streams.recorder = NotingRecorder(streams)
    for _ in range(STEPS):
        prepared.backward(model(batch).float().square().mean())
        prepared.step()
        prepared.zero_grad()
        notes.end_step()
    prepared.synchronize()
    streams.recorder = None
    recording = notes.finish(wait=True)
    prepared.close()
    program = notes.program()
    assert len(recording.spans) == len(program.jobs)
    slept = delays(bandwidths)
    beside = [span.stop - span.start - slept(span.row, span.nbytes) for span in recording.spans]
    return Seen(program, (notes.marks[-1] - notes.marks[1]) / (STEPS - 1), sum(beside) / len(beside))


def on_paper(program: Program, bandwidths: Mapping[str, float], job_s: float) -> float:
    """Time a program at given bandwidths."""
    rates = {stream: bandwidths.get(stream, 1e15) for stream in {job.stream for job in program.jobs}}
    timing = retime(program, Rates({**rates, "compute": 1 / TICK_SECONDS}, latency=job_s))
    assert Timeline(timing.recording).summary().rows["compute"].busy_seconds > 0
    return (timing.marks[-1] - timing.marks[1]) / (STEPS - 1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("other", [name for name in BANDWIDTHS if name != "slow"])
def test_the_paper_agrees_with_the_clock(placement: str, other: str) -> None:
    seen = run(placement, "slow")
    ratio = on_paper(seen.program, SLOW, seen.job_s) / seen.step_s
    print(f"{placement}: {seen.step_s:.3f} s, on paper {ratio:.3f} times that")
    assert ratio == pytest.approx(1, abs=TOLERANCE)
    again = run(placement, other)
    ratio = on_paper(seen.program, BANDWIDTHS[other], again.job_s) / again.step_s
    print(f"{placement}, another {other}: {again.step_s:.3f} s, on paper {ratio:.3f} times that")
    assert ratio == pytest.approx(1, abs=TOLERANCE)
