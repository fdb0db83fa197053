"""Programs on paper: no run is shorter than its work, and none starts early."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.simulation.fair_share import fair_speeds
from penstock.planner.simulation.program import Program, WorkKind
from penstock.planner.simulation.retime import busiest, retime
from tests.lib.fuzz import examples
from tests.lib.paper import Rates, Script

STREAMS = ("upload", "download", "update", "read", "write", "device update")
FILES = ("read", "write")
SHARED = {"memory": (*STREAMS, "compute"), "link": ("upload", "download"), "disk": FILES}
SPEEDS = st.sampled_from((1.0, 2.0, 3.0, 5.0))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    script = Script(draw(st.sampled_from(("accelerator", "threads", "inline"))))
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 8))):
            kind = draw(st.sampled_from(("submit", "submit", "submit", "compute", "wait", "host wait", "synchronize")))
            known = st.integers(0, max(0, len(script.jobs) - 1))
            if kind == "submit":
                stream = draw(st.sampled_from(STREAMS))
                after = sorted(draw(st.sets(known, max_size=2))) if script.jobs else ()
                folder = draw(st.integers(0, 1)) if stream in FILES else -1
                script.submit(stream, draw(st.integers(1, 20)), *after, folder=folder)
            elif kind == "compute":
                script.compute(draw(st.integers(1, 20)))
            elif kind == "synchronize":
                script.synchronize()
            elif script.jobs:
                (script.wait if kind == "wait" else script.host_wait)(draw(known))
        script.end_step()
    return script.program()


@st.composite
def machines(draw: st.DrawFn) -> Rates:
    rates = {name: draw(SPEEDS) for name in (*STREAMS, "compute")}
    latencies = [draw(st.sampled_from((0.0, 0.25))) for _ in range(4)]
    return Rates(rates, {name: (draw(SPEEDS), streams) for name, streams in SHARED.items()}, *latencies)


def critical_path(program: Program, costs: Rates) -> float:
    """The longest chain of jobs, each after what it names; independent of how runs are simulated."""
    over: dict[int, float] = {}
    for item in program.items:
        if item.kind is WorkKind.SUBMIT:
            job = program.jobs[item.index]
            over[item.index] = max((over.get(n, 0.0) for n in job.after), default=0.0) + costs.job(job, program).seconds
    return max(over.values(), default=0.0)


@examples(40)
@given(programs(), machines())
def test_a_run_is_no_shorter_than_its_work(program: Program, costs: Rates) -> None:
    timing = retime(program, costs)
    whole = replace(program, steps=(0, len(program.items)))
    assert timing.recording.stop >= busiest(whole, costs, 0) * (1 - 1e-9)
    assert timing.recording.stop >= critical_path(program, costs) * (1 - 1e-9)
    assert timing.step_s >= busiest(program, costs, len(program.steps) - 2) * (1 - 1e-9)
    assert sum(timing.steps_s) <= timing.recording.stop * (1 + 1e-9)


@examples(40)
@given(programs(), machines())
def test_nothing_begins_before_what_it_follows(program: Program, costs: Rates) -> None:
    recording = retime(program, costs).recording
    submitted = [item.index for item in program.items if item.kind is WorkKind.SUBMIT]
    rows = defaultdict[object, list[int]](list)
    for place, (number, span) in enumerate(zip(submitted, recording.spans, strict=True)):
        job = program.jobs[number]
        assert (span.row, span.label, span.nbytes) == (job.stream, job.label, job.nbytes)
        assert span.after == tuple(submitted.index(other) for other in job.after)
        assert all(recording.spans[other].stop <= span.start for other in span.after)
        assert span.stop - span.start >= costs.job(job, program).seconds * (1 - 1e-9)
        before = rows[job.stream, job.folder]
        assert not before or recording.spans[before[-1]].stop <= span.start
        before.append(place)


@examples(40)
@given(programs(), machines())
def test_no_capacity_does_more_than_it_can(program: Program, costs: Rates) -> None:
    """Work is conserved: what lies between two moments fits between them, and takes what it takes."""
    recording = retime(program, costs).recording
    submitted = [item.index for item in program.items if item.kind is WorkKind.SUBMIT]
    taken = [costs.job(program.jobs[number], program) for number in submitted]
    for start in (span.start for span in recording.spans):
        for stop in (span.stop for span in recording.spans):
            loads = defaultdict[str, float](float)
            for span, each in zip(recording.spans, taken, strict=True):
                if start <= span.start and span.stop <= stop:
                    for name, share in each.uses.items():
                        loads[name] += share * each.seconds
            assert all(load <= (stop - start) * (1 + 1e-6) + 1e-9 for load in loads.values())


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 1.0, allow_subnormal=False), max_size=3),
        max_size=6,
    )
)
def test_speeds_are_max_min_fair(uses: list[Mapping[str, float]]) -> None:
    speeds = fair_speeds(uses)
    used = defaultdict[str, float](float)
    for speed, each in zip(speeds, uses, strict=True):
        assert 0 < speed <= 1
        for name, share in each.items():
            used[name] += speed * share
    assert all(total <= 1 + 1e-6 for total in used.values())
    for speed, each in zip(speeds, uses, strict=True):
        # Whoever is slower than alone has a capacity that is used up, and nobody there is faster.
        assert speed >= 1 - 1e-6 or any(
            used[name] >= 1 - 1e-6
            and all(speed >= other - 1e-6 for other, theirs in zip(speeds, uses, strict=True) if name in theirs)
            for name in each
        )
