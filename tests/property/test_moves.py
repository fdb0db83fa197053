"""Random sequences of training and of moves: the trajectory is that of the same sequence without the moves."""

import random
from typing import Any

import pytest

import penstock
from tests.accounts import assert_table_agrees
from tests.lib.fuzz import TIMES
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, late, separate
from tests.property.test_sequences import Operation, Ours, apply, assert_same

KINDS = ("param", "grad", "master", "optimizer")
SPLITS: list[dict[str, Any]] = [
    {},
    {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    {"optimizer": "cpu"},
    {"params": "cpu", "grads": {"cpu": 0.5, "device": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.7}},
    {"params": {"device": 0.5, "cpu": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4}},
    {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
]


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
            moving.extend({"here": some, "among": [(where, some, chance.random() < 0.3)]}.get(where, [(where, some)]))

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


def check_rank(rank: int, stage: int, seeds: range) -> list[str]:
    """What went another way."""
    failures = []
    for seed in seeds:
        plain, moving = random_sequence(seed)
        chance = random.Random(seed)
        storages, overlap = chance.choice(SPLITS), chance.choice(["none", "forward", "auto"])
        precision = chance.choice(["fp32", "bf16"])
        name, streams = chance.choice([("inline", inline), ("separate", separate), ("late", late)])
        logs = []
        for sequence, make, where, when in ((plain, inline, {}, "none"), (moving, streams, storages, overlap)):
            placement = penstock.Placement(**where, nvme_path=disks(2))
            subject = Moving(make(), placement, precision, 4096, when, stage=stage)
            apply(subject, sequence)
            subject.finish()
            logs.append(subject.log)
        try:
            assert_same(logs[1], logs[0])
        except AssertionError:
            failures.append(f"stage {stage}, seed {seed}: {name} {storages} {overlap} {precision}\n{moving}")
    return failures


def check_stages(rank: int) -> list[str]:
    seeds = {stage: range(20 * stage, 20 * stage + 2 * TIMES) for stage in range(4)}
    return [failure for stage in seeds for failure in check_rank(rank, stage, seeds[stage])]


def test_moves_on_two_ranks_change_no_trajectory() -> None:
    failures = run_ranks(check_stages, 2)
    assert not failures[0] + failures[1], "\n".join(failures[0] + failures[1])
