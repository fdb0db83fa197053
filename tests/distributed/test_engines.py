"""Engines of the same ranks: each has groups of its own, and leaves none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.streams import Streams
from tests.lib.streams import inline, simulated
from tests.parity.rows import Movement
from tests.support import run_ranks, thorough
from tests.unit.engine.test_engines import ON_DEVICE, SIDES, Side, close, make_model, play, what_there_is

LATE = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward").but(tile_bytes=4 << 10)


def train(rank: int, first: Any, second: Any, first_to_close: str) -> list[Tensor]:
    actor, critic = Side(make_model(0), *first), Side(make_model(1), *second)
    seen = play(actor, critic, first_to_close)
    close(actor, critic)
    return seen


def otherwise_on_rank(rank: int, pairs: list[tuple[Any, Any]]) -> list[str]:
    """Pairs of engines, whose threads run at another pace on each rank."""
    on_device = inline, ON_DEVICE
    failures = []
    for number, pair in enumerate(pairs):
        first_to_close = ("actor", "critic")[number % 2]
        expected = train(rank, on_device, on_device, first_to_close)
        found = train(rank, *pair, first_to_close)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            failures.append(f"{pair}, closing the {first_to_close} first")
    return failures


def paced(seed: int, rank: int) -> Callable[[], Streams]:
    def late() -> Streams:
        return simulated(10 * seed + rank)

    return late


def late_on_rank(rank: int) -> list[str]:
    return otherwise_on_rank(rank, [((paced(seed, rank), LATE), (paced(seed + 1, rank), LATE)) for seed in (0, 2)])


def test_engines_whose_threads_run_at_their_own_pace_do_not_mix_up_their_collectives() -> None:
    assert run_ranks(late_on_rank, 2) == [[], []]


def sides_on_rank(rank: int, first: int) -> list[str]:
    stages = [(make, how.but(stage)) for stage, (make, how) in zip((3, 0, 1, 2), SIDES, strict=True)]
    return otherwise_on_rank(rank, [(stages[n], stages[(n + 1) % 4]) for n in range(first, first + 2)])


@pytest.mark.parametrize("first", [0, thorough(2)])
def test_engines_side_by_side_train_as_on_the_device(first: int) -> None:
    assert run_ranks(sides_on_rank, 2, first) == [[], []]


def left_on_rank(rank: int) -> list[Any]:
    def life() -> None:
        actor, critic = Side(make_model(0), *SIDES[0]), Side(make_model(1), *SIDES[3])
        play(actor, critic, "actor")
        close(actor, critic)

    life()
    before = what_there_is()
    life()
    after = what_there_is()
    fewer = before.pop("descriptors") - after.pop("descriptors")  # gloo closes one of its own now and then
    return [fewer >= 0 and before == after, len(dist.distributed_c10d._world.pg_names)]


def test_after_the_last_close_everything_is_as_before_the_first_prepare() -> None:
    assert run_ranks(left_on_rank, 2) == [[True, 1], [True, 1]]
