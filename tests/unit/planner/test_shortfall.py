"""What is missing, and what would be enough: the change, made, is enough, and a little less of it is not."""

from dataclasses import replace

from penstock.planner.workload import Change, Infeasible, Limits, StepWorkload, lacks

GIB = 1 << 30
LOAD = StepWorkload(
    params_bytes=16 * GIB,
    own_params_bytes=16 * GIB,
    grads_bytes=16 * GIB,
    optimizer_bytes=80 * GIB,
    update_bytes=208 * GIB,
    reduced_bytes=16 * GIB,
    forward_gathered_bytes=16 * GIB,
    backward_gathered_bytes=16 * GIB,
    there_bytes={"device": 2 * GIB, "cpu": 1 * GIB},
    activation_peak_bytes={"device": 8 * GIB},
    sharded=frozenset({"params", "grads", "optimizer"}),
)


def change(found: Infeasible, what: str) -> Change:
    (one,) = (each for each in found.changes if each.what == what)
    return one


def test_no_disk_makes_room_on_the_device() -> None:
    found = lacks(LOAD, Limits({"device": 9 * GIB, "cpu": 200 * GIB}))
    assert [each.what for each in found.changes] == ["batch"]


def test_more_ranks_are_as_many_of_each_copy() -> None:
    limits = Limits({"device": 24 * GIB, "cpu": 33 * GIB})
    alone = change(lacks(LOAD, limits), "ranks")
    four = change(lacks(replace(LOAD, copies=4), limits), "ranks")
    assert four.amount == 4 * alone.amount
    assert four.words.endswith(f", {4 * int(alone.amount)} in all")


def test_words() -> None:
    found = lacks(LOAD, Limits({"device": 24 * GIB, "cpu": 64 * GIB}))
    assert found.missing == {"cpu": 35 * GIB}
    assert [each.words for each in found.changes] == ["35.0 GiB of an nvme tier", "1 more rank, 2 in all"]
