"""Programs of a few lines whose times are known: one rule each."""

from collections.abc import Mapping

import pytest

from penstock.ext.observe.timeline import Recording, TraceSpan, Wait
from penstock.planner.simulation.program import Program
from penstock.planner.simulation.retime import Timing, between, busiest, retime
from penstock.trace import NO_LABEL, Label
from tests.paper import Rates, Script

ALONE = Rates()


def times(timing: Timing) -> list[tuple[float, float]]:
    """When each job begins and ends, in the order of submission."""
    return [pytest.approx((span.start, span.stop)) for span in timing.recording.spans]


def sharing(rate: float, *streams: str, rates: Mapping[str, float] | None = None) -> Rates:
    """A machine of which some streams share a capacity."""
    return Rates(rates or {}, {"shared": (rate, streams)})


#: One capacity of a byte/s or two, bytes of the jobs that share it by stream, and when each begins and ends.
SHARING = {
    "two take twice as long": (1, {"upload": 4, "download": 4}, [(0, 8), (0, 8)]),
    "the last has all of it": (1, {"upload": 2, "download": 6}, [(0, 4), (0, 8)]),
    "enough for both slows none": (2, {"upload": 2, "download": 6}, [(0, 2), (0, 6)]),
    "another stream is as fast as alone": (1, {"upload": 4, "download": 4, "write": 4}, [(0, 8), (0, 8), (0, 4)]),
    "a third each until one is over": (1, {"upload": 1, "download": 2, "update": 2}, [(0, 3), (0, 5), (0, 5)]),
}


class TestSharing:
    @pytest.mark.parametrize("case", SHARING)
    def test_jobs_at_the_same_time_share(self, case: str) -> None:
        rate, jobs, expected = SHARING[case]
        script = Script("threads")
        for stream, nbytes in jobs.items():
            script.submit(stream, nbytes)
        assert times(retime(script.program(), sharing(rate, "upload", "download", "update"))) == expected

    def test_what_one_cannot_use_is_left_to_others(self) -> None:
        script = Script("threads")
        for stream in ("upload", "download", "update"):
            script.submit(stream, 6)
        shared = {"link": (1.0, ("upload", "download")), "memory": (2.0, ("download", "update"))}
        # Download has half of the link, so half a byte/s of memory's two: update has its one byte/s.
        assert times(retime(script.program(), Rates({}, shared))) == [(0, 12), (0, 12), (0, 6)]

    def test_a_job_that_begins_later_slows_the_one_under_way(self) -> None:
        script = Script("threads")
        script.submit("upload", 6)
        script.compute(2)
        script.submit("download", 2)
        assert times(retime(script.program(), sharing(1, "upload", "download"))) == [(0, 8), (2, 6)]

    def test_compute_shares_as_well(self) -> None:
        script = Script("threads")
        script.submit("update", 4)
        script.compute(4)
        timing = retime(script.program(), sharing(1, "update", "compute"))
        assert times(timing) == [(0, 8)]
        assert timing.step_s == pytest.approx(8)


class TestThreads:
    def test_jobs_of_a_stream_follow_each_other(self) -> None:
        script = Script("threads")
        script.submit("upload", 3)
        script.submit("upload", 4)
        assert times(retime(script.program(), ALONE)) == [(0, 3), (3, 7)]

    def test_streams_do_not_wait_for_each_other(self) -> None:
        script = Script("threads")
        script.submit("upload", 3)
        script.submit("update", 4)
        assert times(retime(script.program(), ALONE)) == [(0, 3), (0, 4)]

    def test_a_job_follows_those_that_it_names(self) -> None:
        script = Script("threads")
        script.submit("upload", 3)
        script.submit("update", 4, 0)
        script.submit("download", 1, 0, 1)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3), (3, 7), (7, 8)]
        assert [span.after for span in timing.recording.spans] == [(), (0,), (0, 1)]

    def test_a_job_that_waits_holds_its_stream(self) -> None:
        script = Script("threads")
        script.submit("update", 5)
        script.submit("upload", 1, 0)
        script.submit("upload", 1)
        assert times(retime(script.program(), ALONE))[1:] == [(5, 6), (6, 7)]

    def test_compute_is_the_hosts_own_time(self) -> None:
        script = Script("threads")
        script.compute(3)
        script.submit("upload", 1)
        assert times(retime(script.program(), ALONE)) == [(3, 4)]

    def test_waiting_holds_the_host(self) -> None:
        script = Script("threads")
        script.submit("upload", 3)
        script.wait(0)
        script.compute(2)
        script.submit("download", 1)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3), (5, 6)]
        assert timing.recording.waits == [Wait(0, 0, 3)]

    def test_transfers_of_two_disks_go_on_together(self) -> None:
        script = Script("threads")
        for folder in (0, 1, 0):
            script.submit("read", 3, folder=folder)
        assert times(retime(script.program(), ALONE)) == [(0, 3), (0, 3), (3, 6)]

    def test_a_transfer_that_waits_holds_those_behind_it(self) -> None:
        script = Script("threads")
        script.submit("update", 2)
        script.submit("write", 3, 0, folder=0)
        script.submit("write", 3, folder=1)
        assert times(retime(script.program(), ALONE))[1:] == [(2, 5), (2, 5)]


class TestAccelerator:
    def test_compute_does_what_it_is_given_in_order_while_the_host_goes_on(self) -> None:
        script = Script("accelerator")
        script.compute(5, "one")
        script.compute(5, "two")
        script.submit("update", 1)  # of the host
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 1)]
        assert timing.recording.stop == 10

    def test_a_segment_begins_once_the_host_has_enqueued_it(self) -> None:
        script = Script("accelerator")
        script.compute(1)
        script.compute(1)
        timing = retime(script.program(), Rates(enqueue=3))
        assert timing.recording.compute == [
            (3, Label("forward", "unit")),
            (4, NO_LABEL),
            (6, Label("forward", "unit")),
            (7, NO_LABEL),
        ]

    def test_compute_that_goes_on_with_the_same_does_not_turn(self) -> None:
        script = Script("accelerator")
        for unit in ("one", "one", "two"):
            script.compute(1, unit)
        turns = [(0, Label("forward", "one")), (2, Label("forward", "two")), (3, NO_LABEL)]
        assert retime(script.program(), ALONE).recording.compute == turns

    def test_a_job_of_the_device_follows_the_compute_before_it(self) -> None:
        script = Script("accelerator")
        script.compute(5)
        script.submit("download", 1)
        script.compute(5)
        assert times(retime(script.program(), ALONE)) == [(5, 6)]

    def test_each_submission_takes_the_host_its_time(self) -> None:
        script = Script("accelerator")
        script.submit("update", 1)
        script.submit("read", 1, folder=0)
        assert times(retime(script.program(), Rates(submit=2))) == [(2, 3), (4, 5)]

    def test_compute_waits_and_the_host_does_not(self) -> None:
        script = Script("accelerator")
        script.submit("upload", 4)
        script.wait(0)
        script.compute(2)
        script.submit("update", 1)
        script.submit("download", 1)  # follows compute, which waits
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 4), (0, 1), (6, 7)]
        assert timing.recording.waits == [Wait(0, 0, 4)]

    def test_the_host_waits_and_compute_goes_on(self) -> None:
        script = Script("accelerator")
        script.submit("update", 4)
        script.compute(2)
        script.host_wait(0)
        script.submit("read", 1, folder=0)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 4), (4, 5)]
        assert timing.recording.waits == [Wait(0, 0, 4, by_host=True)]
        assert timing.recording.compute == [(0, Label("forward", "unit")), (2, NO_LABEL)]

    def test_the_host_waits_for_all_that_compute_was_given(self) -> None:
        script = Script("accelerator")
        script.compute(5)
        script.synchronize()
        script.submit("update", 1)
        assert times(retime(script.program(), ALONE)) == [(5, 6)]

    def test_a_copy_that_follows_the_host_is_enqueued_by_a_thread_once_that_is_over(self) -> None:
        script = Script("accelerator")
        script.submit("update", 4)
        script.submit("upload", 1, 0)
        script.submit("upload", 1)  # behind it, though it follows nothing
        script.submit("download", 1)
        assert times(retime(script.program(), ALONE)) == [(0, 4), (4, 5), (5, 6), (0, 1)]

    def test_compute_cannot_follow_what_the_device_was_not_given_yet_so_the_host_waits(self) -> None:
        script = Script("accelerator")
        script.submit("update", 4)
        script.submit("upload", 3, 0)
        script.compute(1)
        script.wait(1)
        script.submit("read", 1, folder=0)  # once the upload is enqueued, and not once it is over
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 4), (4, 7), (4, 5)]
        assert timing.recording.waits == [Wait(1, 0, 4, by_host=True), Wait(1, 4, 7)]

    def test_compute_that_follows_work_of_the_host_has_the_host_wait(self) -> None:
        script = Script("accelerator")
        script.submit("update", 4)
        script.wait(0)
        script.compute(1)
        timing = retime(script.program(), ALONE)
        assert timing.recording.waits == [Wait(0, 0, 4, by_host=True)]
        assert timing.recording.compute == [(4, Label("forward", "unit")), (5, NO_LABEL)]

    def test_a_collective_is_enqueued_by_the_host_after_what_a_thread_enqueues(self) -> None:
        script = Script("accelerator")
        script.submit("update", 4)
        script.submit("upload", 3, 0)
        script.submit("collective", 1, 1)
        script.submit("read", 1, folder=0)
        assert times(retime(script.program(), ALONE)) == [(0, 4), (4, 7), (7, 8), (4, 5)]

    def test_a_thread_that_slept_wakes_up_first(self) -> None:
        script = Script("accelerator")
        script.submit("download", 4)
        script.submit("update", 2, 0)  # its thread sleeps until the copy is over
        script.submit("update", 2)  # and is awake when it comes to this
        script.submit("upload", 1, 2)  # another thread enqueues it
        timing = retime(script.program(), Rates(wake=0.5))
        assert times(timing) == [(0, 4), (4.5, 6.5), (6.5, 8.5), (9, 10)]

    def test_the_host_wakes_up_from_what_it_waits_for_and_not_from_what_is_over(self) -> None:
        script = Script("accelerator")
        script.compute(4)
        script.synchronize()
        script.submit("download", 2)
        script.host_wait(0)
        script.host_wait(0)
        script.submit("download", 1)
        script.submit("collective", 1)
        assert times(retime(script.program(), Rates(wake=0.5))) == [(4.5, 6.5), (7, 8), (7, 8)]

    def test_the_host_takes_part_in_a_collective(self) -> None:
        script = Script("accelerator")
        script.meet(3)
        script.submit("update", 1)
        assert times(retime(script.program(), ALONE)) == [(3, 4)]


class TestInline:
    def test_a_job_runs_in_the_thread_that_computes(self) -> None:
        script = Script("inline")
        script.submit("update", 3)
        script.compute(2)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3)]
        assert timing.recording.spans[0].inline
        assert timing.recording.compute == [(3, Label("forward", "unit")), (5, NO_LABEL)]

    def test_a_transfer_goes_on_by_itself(self) -> None:
        script = Script("inline")
        script.submit("read", 3, folder=0)
        script.compute(2)
        script.wait(0)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3)]
        assert timing.recording.waits == [Wait(0, 2, 3)]

    def test_what_follows_a_transfer_is_for_a_thread(self) -> None:
        script = Script("inline")
        script.submit("read", 3, folder=0)
        script.submit("update", 2, 0)
        script.submit("update", 2)  # behind it
        script.compute(4)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3), (3, 5), (5, 7)]
        assert not any(span.inline for span in timing.recording.spans)
        assert timing.recording.stop == 7

    def test_a_transfer_of_another_disk_is_not_held_up(self) -> None:
        script = Script("inline")
        for folder in (0, 0, 1):
            script.submit("read", 3, folder=folder)
        assert times(retime(script.program(), ALONE)) == [(0, 3), (3, 6), (0, 3)]

    def test_a_thread_is_through_with_a_transfer_that_it_has_started(self) -> None:
        script = Script("inline")
        script.submit("read", 3, folder=0)
        script.submit("write", 9, 0, folder=0)
        script.compute(4)
        script.submit("write", 1)  # nothing is queued before it
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3), (3, 12), (4, 5)]
        assert timing.recording.spans[2].inline

    def test_rounding_does_not_decide_what_was_over(self) -> None:
        script = Script("inline")
        for nbytes in (1, 2):
            script.submit("read", nbytes, folder=0)  # 0.1 + 0.2 is more than 0.3 is
        script.compute(3)
        script.submit("update", 1, 1)
        assert retime(script.program(), Rates({"read": 10, "compute": 10})).recording.spans[2].inline

    def test_a_collective_is_issued_by_its_caller_who_waits(self) -> None:
        script = Script("inline")
        script.submit("read", 3, folder=0)
        script.submit("collective", 2, 0)
        timing = retime(script.program(), ALONE)
        assert times(timing) == [(0, 3), (3, 5)]
        assert timing.recording.spans[1].inline
        assert timing.recording.waits == [Wait(0, 0, 3)]


class TestSteps:
    def two_steps(self) -> Program:
        script = Script("threads")
        late = None
        for _ in range(2):
            script.compute(2)
            if late is not None:
                script.wait(late)
            late = script.submit("update", 3)
            script.end_step()
        return script.program()

    def test_the_last_step_is_the_steady_one(self) -> None:
        timing = retime(self.two_steps(), ALONE)
        assert timing.steps_s == [2, 3]
        assert timing.step_s == 3
        assert timing.marks == [0, 2, 5]

    def test_a_lone_step_is_all_that_it_does(self) -> None:
        script = Script("threads")
        script.submit("upload", 3)
        script.submit("update", 4, 0)
        assert retime(script.program(), ALONE).step_s == 7

    def test_no_steady_step_is_shorter_than_its_busiest_resource(self) -> None:
        script = Script("threads")
        for _ in range(2):
            script.compute(1)
            script.submit("write", 5, folder=0)  # nobody waits for it
            script.end_step()
        assert busiest(script.program(), ALONE, 1) == 5
        assert retime(script.program(), ALONE).step_s == 5

    def test_of_a_device_it_ends_when_compute_does(self) -> None:
        script = Script("accelerator")
        for _ in range(2):
            script.compute(4)
            script.end_step()
        assert retime(script.program(), ALONE).marks == [0, 4, 8]

    def test_jobs_from_before_the_program_are_over(self) -> None:
        script = Script("threads")
        script.submit("upload", 5)
        del script.items[0]
        script.wait(0)
        script.submit("update", 1, 0)
        assert times(retime(script.program(), ALONE)) == [(0, 1)]

    def test_busy_time_and_waits_are_those_of_the_last_step(self) -> None:
        timing = retime(self.two_steps(), ALONE)
        assert timing.busy_s == {"device compute": 2, "host update": 3}
        assert timing.waits_s == {"do job 0 (update)": 1}
        assert timing.bound_by == "host update"

    def test_a_program_that_waits_for_what_it_never_submits(self) -> None:
        script = Script("threads")
        script.submit("upload", 1)
        script.wait(0)
        script.items.reverse()
        with pytest.raises(ValueError, match="never submits"):
            retime(script.program(), ALONE)

    def test_a_program_without_steps(self) -> None:
        with pytest.raises(ValueError, match="no step"):
            retime(Program("threads", [], [], [], [], [], [0], {}), ALONE)


def test_a_faster_job_may_delay_what_compute_waits_for() -> None:
    """It starts its follower sooner, which shares a capacity with that."""
    script = Script("threads")
    script.submit("upload", 4)
    script.submit("download", 6, 0)
    script.submit("update", 4)
    script.wait(2)
    script.compute(20)
    for rate, seconds in ((1, 24), (2, 26)):
        machine = sharing(1, "download", "update", rates={"upload": rate})
        assert retime(script.program(), machine).step_s == pytest.approx(seconds)


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
