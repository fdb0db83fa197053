"""Programs of a few lines whose times are known: one rule each."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.ext.observe.timeline import Recording, TraceSpan, Wait
from penstock.planner.simulation.program import BackEnd, Program
from penstock.planner.simulation.retime import Timing, between, busiest, retime
from penstock.trace import NO_LABEL, Label
from tests.lib.paper import Rates, Script

ALONE = Rates()
FORWARD = Label("forward", "unit")


def sharing(rate: float, *streams: str, **rates: float) -> Rates:
    """A machine of which some streams share a capacity."""
    return Rates(rates, {"shared": (rate, streams or ("upload", "download", "update"))})


@dataclass(frozen=True)
class Case:
    """A program, and when its jobs begin and end, in the order of submission.

    Attributes:
        waits: all of them.
        turns: what compute is with, and since when.
        inline: whether each job runs in the thread that computes.
        step_s: how long the last step takes.
    """

    back_end: BackEnd
    text: str
    times: list[tuple[float, float]]
    machine: Rates = field(default_factory=Rates)
    waits: list[Wait] | None = None
    turns: list[tuple[float, Label]] | None = None
    inline: list[bool] | None = None
    step_s: float | None = None


CASES = {
    # One capacity of a byte/s, and jobs that share it.
    "a job that begins later slows the one under way": Case(
        "threads", "upload 6; compute 2; download 2", [(0, 8), (2, 6)], sharing(1)
    ),
    "compute shares as well": Case(
        "threads", "update 4; compute 4", [(0, 8)], sharing(1, "update", "compute"), step_s=8
    ),
    # Threads
    "a job that waits holds its stream": Case(
        "threads", "update 5; upload 1 after 0; upload 1", [(0, 5), (5, 6), (6, 7)]
    ),
    "waiting holds the host": Case(
        "threads", "upload 3; wait 0; compute 2; download 1", [(0, 3), (5, 6)], waits=[Wait(0, 0, 3)]
    ),
    "a transfer that waits holds those behind it": Case(
        "threads", "update 2; write 3 disk 0 after 0; write 3 disk 1", [(0, 2), (2, 5), (2, 5)]
    ),
    # An accelerator: compute does what it is given in order, and the host goes on
    "a segment begins once the host has enqueued it": Case(
        "accelerator",
        "compute 1; compute 1",
        [],
        Rates(enqueue=3),
        turns=[(3, FORWARD), (4, NO_LABEL), (6, FORWARD), (7, NO_LABEL)],
    ),
    "compute waits and the host does not": Case(
        "accelerator",
        "upload 4; wait 0; compute 2; update 1; download 1",  # the download follows compute, which waits
        [(0, 4), (0, 1), (6, 7)],
        waits=[Wait(0, 0, 4)],
    ),
    "the host waits and compute goes on": Case(
        "accelerator",
        "update 4; compute 2; host_wait 0; read 1 disk 0",
        [(0, 4), (4, 5)],
        waits=[Wait(0, 0, 4, by_host=True)],
        turns=[(0, FORWARD), (2, NO_LABEL)],
    ),
    "the host waits for all that compute was given": Case("accelerator", "compute 5; synchronize; update 1", [(5, 6)]),
    "a copy that follows the host is enqueued by a thread once that is over": Case(
        "accelerator",
        "update 4; upload 1 after 0; upload 1; download 1",  # the second upload is behind the first
        [(0, 4), (4, 5), (5, 6), (0, 1)],
    ),
    # Until the upload is enqueued, and not until it is over.
    "compute cannot follow what the device was not given yet, so the host waits": Case(
        "accelerator",
        "update 4; upload 3 after 0; compute 1; wait 1; read 1 disk 0",
        [(0, 4), (4, 7), (4, 5)],
        waits=[Wait(1, 0, 4, by_host=True), Wait(1, 4, 7)],
    ),
    "compute that follows work of the host has the host wait": Case(
        "accelerator",
        "update 4; wait 0; compute 1",
        [(0, 4)],
        waits=[Wait(0, 0, 4, by_host=True)],
        turns=[(4, FORWARD), (5, NO_LABEL)],
    ),
    "a collective is enqueued by the host after what a thread enqueues": Case(
        "accelerator",
        "update 4; upload 3 after 0; collective 1 after 1; read 1 disk 0",
        [(0, 4), (4, 7), (7, 8), (4, 5)],
    ),
    # Its thread sleeps until the copy is over, and is awake when it comes to the second update.
    "a thread that slept wakes up first": Case(
        "accelerator",
        "download 4; update 2 after 0; update 2; upload 1 after 2",
        [(0, 4), (4.5, 6.5), (6.5, 8.5), (9, 10)],
        Rates(wake=0.5),
    ),
    "the host wakes up from what it waits for and not from what is over": Case(
        "accelerator",
        "compute 4; synchronize; download 2; host_wait 0; host_wait 0; download 1; collective 1",
        [(4.5, 6.5), (7, 8), (7, 8)],
        Rates(wake=0.5),
    ),
    # Nothing is asynchronous
    "a job runs in the thread that computes": Case(
        "inline", "update 3; compute 2", [(0, 3)], inline=[True], turns=[(3, FORWARD), (5, NO_LABEL)]
    ),
    "what follows a transfer is for a thread": Case(
        "inline",
        "read 3 disk 0; update 2 after 0; update 2; compute 4",
        [(0, 3), (3, 5), (5, 7)],
        inline=[False] * 3,
        step_s=7,
    ),
    "a thread is through with a transfer that it has started": Case(
        "inline",
        "read 3 disk 0; write 9 disk 0 after 0; compute 4; write 1",  # nothing is queued before the last one
        [(0, 3), (3, 12), (4, 5)],
        inline=[False, False, True],
    ),
    # 0.1 + 0.2 is more than 0.3 is.
    "rounding does not decide what was over": Case(
        "inline",
        "read 1 disk 0; read 2 disk 0; compute 3; update 1 after 1",
        [(0, 0.1), (0.1, 0.3), (0.3, 1.3)],
        Rates({"read": 10, "compute": 10}),
        inline=[False, False, True],
    ),
    "a collective is issued by its caller who waits": Case(
        "inline", "read 3 disk 0; collective 2 after 0", [(0, 3), (3, 5)], inline=[False, True], waits=[Wait(0, 0, 3)]
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_times(case: Case) -> None:
    program = Script(case.back_end).write(case.text).program()
    timing = retime(program, case.machine)
    spans = timing.recording.spans
    assert [(span.start, span.stop) for span in spans] == [pytest.approx(each) for each in case.times]
    assert [span.after for span in spans] == [job.after for job in program.jobs]
    assert case.waits is None or timing.recording.waits == case.waits
    assert case.turns is None or timing.recording.compute == case.turns
    assert case.inline is None or [span.inline for span in spans] == case.inline
    assert case.step_s is None or timing.step_s == pytest.approx(case.step_s)


def timed(back_end: BackEnd, text: str) -> Timing:
    return retime(Script(back_end).write(text).program(), ALONE)


def test_the_last_step_is_the_steady_one_with_its_busy_time_and_waits() -> None:
    timing = timed("threads", "compute 2; update 3; end_step; compute 2; wait 0; update 3; end_step")
    assert timing.steps_s == [2, 3]
    assert timing.step_s == 3
    assert timing.marks == [0, 2, 5]
    assert timing.busy_s == {"device compute": 2, "host update": 3}
    assert timing.waits_s == {"do job 0 (update)": 1}
    assert timing.bound_by == "host update"


def test_no_steady_step_is_shorter_than_its_busiest_resource() -> None:
    text = "compute 1; write 5 disk 0; end_step"  # nobody waits for the write
    program = Script("threads").write(f"{text}; {text}").program()
    assert busiest(program, ALONE, 1) == 5
    assert retime(program, ALONE).step_s == 5


def test_of_a_device_a_step_ends_when_compute_does() -> None:
    assert timed("accelerator", "compute 4; end_step; compute 4; end_step").marks == [0, 4, 8]


def test_jobs_from_before_the_program_are_over() -> None:
    script = Script("threads").write("upload 5")
    del script.items[0]
    timing = retime(script.write("wait 0; update 1 after 0").program(), ALONE)
    assert [(span.start, span.stop) for span in timing.recording.spans] == [(0, 1)]


def test_programs_that_are_none_are_refused() -> None:
    script = Script("threads").write("upload 1; wait 0")
    script.items.reverse()
    with pytest.raises(ValueError, match="never submits"):
        retime(script.program(), ALONE)
    nothing: list[Any] = []
    with pytest.raises(ValueError, match="no step"):
        retime(Program("threads", nothing, nothing, nothing, nothing, nothing, [0], {}), ALONE)


def test_a_part_of_a_recording() -> None:
    one, two = Label("one"), Label("two")
    spans = [
        TraceSpan("read", one, 0, 2),
        TraceSpan("upload", one, 2, 5, 7, False, (0,)),
        TraceSpan("update", two, 4, 9, after=(0, 1)),
    ]
    whole = Recording(0, 10, spans, [Wait(0, 0, 2), Wait(1, 2, 4)], [(0, one), (3.5, two)])
    assert between(whole, 3, 6) == Recording(
        3,
        6,
        [TraceSpan("upload", one, 3, 5, 7, False, ()), TraceSpan("update", two, 4, 6, after=(0,))],
        [Wait(0, 3, 4)],
        [(3, one), (3.5, two)],
    )
