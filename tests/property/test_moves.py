"""Random sequences of training and of moves: the trajectory is that of the same sequence without the moves."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.runtime.streams import Streams
from tests.accounts import assert_table_agrees
from tests.lib.engines import prepare_on
from tests.lib.fuzz import TIMES, examples
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.property.test_sequences import Log, Operation, Ours, apply, assert_same, make_net, sequences

KINDS = ("param", "grad", "master", "optimizer")
SPLITS: list[dict[str, Any]] = [
    {},
    {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    {"optimizer": "cpu"},
    {"params": "cpu", "grads": {"cpu": 0.5, "device": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.7}},
    {"params": {"device": 0.5, "cpu": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4}},
    {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
]
MOVES = ("offload", "reload", "report", "settle")


class Moving(Ours):
    """What can be done at any moment: between operations, and where forward and backward pass the second block."""

    def offload(self, kinds: tuple[str, ...] | None, to: str, non_blocking: bool, keep: bool) -> None:
        self.optimizer.offload_states(kinds, to, non_blocking=non_blocking, keep=keep)
        if not non_blocking:
            for kind in kinds or KINDS:
                self.optimizer.locations().assert_on(kind, to)
            assert_table_agrees(self.optimizer)

    def reload(self, non_blocking: bool) -> None:
        self.optimizer.reload_states(non_blocking=non_blocking)

    def report(self) -> None:
        assert str(self.optimizer.locations())

    def settle(self) -> None:
        self.optimizer.synchronize()
        self.optimizer._engine.offloader._cleaned.synchronize()
        assert_table_agrees(self.optimizer)

    def inside(self, moves: list[Operation]) -> None:
        """The next forward makes these moves, in a block that is under way."""

        def move(*_: Any) -> None:
            handle.remove()
            apply(self, moves)

        handle = self.model.blocks[0].second.register_forward_pre_hook(move)

    def behind(self, moves: list[Operation]) -> None:
        """The next backward makes these moves, where it passes the output of a block."""

        def watch(module: Any, args: Any, output: Any) -> None:
            handle.remove()
            if output.requires_grad:
                output.register_hook(lambda grad: apply(self, moves))

        handle = self.model.blocks[0].first.register_forward_hook(watch)

    def among(self, moves: list[Operation], fails: bool) -> None:
        """Moves while all parameters are gathered."""
        with pytest.raises(penstock.PenstockError) if fails else self.optimizer.gathered(modify=True):
            if not fails:
                apply(self, moves)
                return
            with self.optimizer.gathered(modify=True):
                for p in self.parameters:
                    p.data.add_(1.0)
                apply(self, moves)
                raise penstock.PenstockError("left")


kinds = st.one_of(st.none(), st.lists(st.sampled_from(KINDS), min_size=1, unique=True).map(tuple))
single = st.one_of(
    st.tuples(st.just("offload"), kinds, st.sampled_from(["cpu", "nvme"]), st.booleans(), st.booleans()),
    st.tuples(st.just("reload"), st.booleans()),
    st.tuples(st.just("report")),
    st.tuples(st.just("settle")),
)
moves = st.lists(single, max_size=3)
anywhere = st.one_of(
    single,
    st.tuples(st.sampled_from(["inside", "behind"]), moves),
    st.tuples(st.just("among"), moves, st.booleans()),
)


@st.composite
def moving_sequences(draw: Any) -> tuple[list[Operation], list[Operation]]:
    """A sequence without moves and the same with them."""
    plain = draw(sequences())
    moving = []
    for operation in plain:
        moving += [*draw(st.lists(anywhere, max_size=2)), operation]
    return plain, [*moving, *draw(st.lists(anywhere, max_size=2))]


def run(streams: Streams, sequence: list[Operation], *arguments: Any) -> Log:
    subject = Moving(streams, *arguments)
    apply(subject, sequence)
    subject.finish()
    return subject.log


def late() -> Streams:
    return simulated(most_seconds=0.0005)


@examples(20)
@given(
    st.sampled_from([late, separate, inline]),
    moving_sequences(),
    st.sampled_from(SPLITS),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([4096, 1 << 22]),
    st.sampled_from(["none", "forward", "auto"]),
)
def test_moves_change_no_trajectory(
    make: Any, both: Any, storages: dict[str, Any], precision: str, tile_bytes: int, overlap: str
) -> None:
    plain, moving = both
    placement = penstock.Placement(**storages, nvme_path=disks(2))
    still = run(inline(), plain, penstock.Placement(), precision, tile_bytes, "none")
    assert_same(run(make(), moving, placement, precision, tile_bytes, overlap), still)


def random_move(chance: random.Random) -> Operation:
    what = chance.choice(["offload", "offload", "reload", "report", "settle"])
    if what == "offload":
        some = tuple(chance.sample(KINDS, chance.randint(1, 4)))
        to, non_blocking, keep = chance.choice(["cpu", "nvme"]), chance.random() < 0.5, chance.random() < 0.5
        return what, chance.choice([None, some]), to, non_blocking, keep
    return (what, chance.random() < 0.5) if what == "reload" else (what,)


def random_sequence(seed: int) -> tuple[list[Operation], list[Operation]]:
    """The same on every rank."""
    chance = random.Random(seed)
    plain: list[Operation] = []
    moving: list[Operation] = []

    def move() -> None:
        for _ in range(chance.randint(0, 2)):
            some = [random_move(chance) for _ in range(chance.randint(1, 2))]
            where = chance.choice(["here", "here", "inside", "behind", "among"])
            moving.extend({"here": some, "among": [(where, some, False)]}.get(where, [(where, some)]))

    for _ in range(3):
        for _ in range(chance.randint(1, 2)):
            operation = ("backward", chance.randint(0, 50), chance.choice([1, 2]), 1.0, chance.random() < 0.4)
            move()
            plain.append(operation)
            moving.append(operation)
        last = ("backward", chance.randint(0, 50), 2, 1.0, False)
        for operation in (last, ("step",), chance.choice([("evaluate", 3), ("forward", 4)]), ("zero_grad",)):
            move()
            plain.append(operation)
            moving.append(operation)
    return plain, moving


class MovingRank(Moving):
    """One of two ranks, at a stage."""

    def __init__(self, stage: int, streams: Streams, placement: penstock.Placement, overlap: str) -> None:
        super(Ours, self).__init__()
        from tests.property.test_sequences import CLIP, make_optimizer

        self.model = make_net()
        self.optimizer = prepare_on(
            streams,
            self.model,
            make_optimizer(self.model),
            stage=stage,
            placement=placement,
            max_grad_norm=CLIP,
            overlap=overlap,
            options=penstock.Options(tile_bytes=4096),
        )


def check_rank(rank: int, stage: int, seeds: range) -> list[str]:
    """What went another way."""
    failures = []
    for seed in seeds:
        plain, moving = random_sequence(seed)
        chance = random.Random(seed)
        storages, overlap = chance.choice(SPLITS), chance.choice(["none", "forward", "auto"])
        name, streams = chance.choice([("inline", inline), ("separate", separate), ("late", late)])
        logs = []
        for sequence, make, where, when in ((plain, inline, {}, "none"), (moving, streams, storages, overlap)):
            subject = MovingRank(stage, make(), penstock.Placement(**where, nvme_path=disks(2)), when)
            apply(subject, sequence)
            subject.finish()
            logs.append(subject.log)
        try:
            assert_same(logs[1], logs[0])
        except AssertionError:
            failures.append(f"stage {stage}, seed {seed}: {name} {storages} {overlap}\n{moving}")
    return failures


def check_stages(rank: int) -> list[str]:
    return [
        failure for stage in range(4) for failure in check_rank(rank, stage, range(20 * stage, 20 * stage + 4 * TIMES))
    ]


def test_moves_on_two_ranks_change_no_trajectory() -> None:
    failures = run_ranks(check_stages, 2)
    assert not failures[0] + failures[1], "\n".join(failures[0] + failures[1])
