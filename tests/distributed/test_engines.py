"""Engines of the same ranks: each has groups of its own, and leaves none."""

import gc
import threading
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.lib.engines import ON_CPU, ON_NVME, prepared
from tests.lib.models import batch_of, stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

LATE = {**ON_CPU, "overlap": "forward"}
#: What each of two engines is made of: its streams, by a seed, and how it is prepared.
SIDES: list[tuple[Any, dict[str, Any]]] = [
    (lambda seed: inline(), {**ON_NVME, "overlap": "forward"}),
    (simulated, {**ON_CPU, "overlap": "backward", "stage": 0}),
    (lambda seed: separate(), {"optimizer": "cpu", "stage": 1}),
    (simulated, {"grads": {"device": 0.5, "cpu": 0.5}, "optimizer": "cpu", "stage": 2}),
]
ON_DEVICE = (lambda seed: inline(), {})
PAIRS = [
    ((simulated, LATE), (simulated, LATE)),  # whose threads run at another pace on each rank
    (SIDES[0], SIDES[1]),
    (SIDES[2], SIDES[3]),
    (SIDES[3], SIDES[0]),
]


def train(rank: int, *sides: tuple[Any, dict[str, Any]], first_to_close: int = 0) -> list[Tensor]:
    """Steps of two engines by turns, with losses through both; one is closed, and the other one goes on alone."""
    made = [
        prepared(stack(seed=number), streams(10 * number + rank), **how) for number, (streams, how) in enumerate(sides)
    ]
    (actor, _), (critic, _) = made
    seen: list[Tensor] = []
    for step in range(3):
        x = batch_of(actor, step)
        with made[0][1].no_sync(), made[1][1].no_sync():
            for model, optimizer in made:
                optimizer.backward(model(x).square().mean())
        both = (critic(torch.tanh(actor(x))) - x).square().mean()
        made[step % 2][1].backward(both)
        seen.append(both.detach())
        for _, optimizer in made[:: 1 if step % 2 else -1]:
            seen.append(torch.tensor(optimizer.step().grad_norm))
            optimizer.zero_grad()
    last, optimizer = made[1 - first_to_close]
    optimizer.backward(last(x).square().mean())
    closed, other = made[first_to_close]
    other.close()
    seen += [p.detach().clone() for p in closed.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(last(x).square().mean())
    optimizer.step()
    seen += [optimizer.full_param(p) for p in last.parameters()]
    optimizer.close()
    return seen


def side_by_side(rank: int) -> list[int]:
    """Numbers of pairs that train otherwise than on the device; what they leave is compared after the first life."""
    expected = [train(rank, ON_DEVICE, ON_DEVICE, first_to_close=first) for first in range(2)]
    wrong = []
    for number, pair in enumerate(PAIRS):
        found = train(rank, *pair, first_to_close=number % 2)
        wrong += [number] if not all(map(torch.equal, found, expected[number % 2])) else []
    before = what_there_is()
    train(rank, SIDES[0], SIDES[3])
    assert what_there_is() == before
    assert len(dist.distributed_c10d._world.pg_names) == 1
    return wrong


def what_there_is() -> tuple[int, Counter[str]]:
    gc.collect()
    kinds = map(type, gc.get_objects())
    return threading.active_count(), Counter(t.__name__ for t in kinds if str(t.__module__).startswith("penstock."))


def test_engines_side_by_side_train_as_on_the_device_and_leave_nothing() -> None:
    assert run_ranks(side_by_side, 2) == [[], []]
