"""Two ranks, each with a strict device: collectives run late, on the stream they were issued from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.device.running import late_ranks, strict
from tests.distributed.test_order import Mean
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, make_model, shares, train

STEPS = 2
KIB = 1 << 10
SUMMED = Arithmetic(precision="bf16", accumulation=2, clip=0.5)
UNCLIPPED = Arithmetic(precision="bf16", accumulation=2, no_sync=True)
ROWS = [
    (SUMMED, Movement(3, "cpu", "cpu", "cpu")),
    (UNCLIPPED, Movement(3, "cpu", "cpu", "cpu", overlap="backward")),
    (SUMMED, Movement(3, "nvme", "cpu", "nvme")),
    (SUMMED, Movement(2, "cpu", shares(device=0.35, cpu=0.65), "cpu").but(streamed_updates=0.5, tile_bytes=4 * KIB)),
    (UNCLIPPED, Movement(1, "cpu", "cpu", "cpu")),
]


def measured(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What some work gives on this rank's device, and what was wrong there."""
    from tests.device.backend import native

    native.configure(0, 0.005, True)
    result = work()
    torch.accelerator.synchronize()
    return result, native.take_races()


def rows(rank: int, streams: Callable[[], Streams], on_device: bool) -> list[list[object]]:
    found = []
    for what, how in ROWS:
        transfers = how if on_device else Movement(how.stage)
        found.append(bits(train(what, transfers, streams=streams(), rank=rank, world_size=2, steps=STEPS)))
    return found


class Mixing(nn.Module):
    """A batch norm over ranks, by the user's own collective in forward, and another one in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x - Mean.apply(x.mean(0), dist.group.WORLD)


def mixing(rank: int, placement: penstock.Placement | None) -> list[Any]:
    """Losses and parameters of a model whose blocks talk to other ranks."""
    model = make_model()
    for block in model.blocks:
        block.mix = nn.Sequential(block.mix, Mixing())
    optimizer = penstock.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="fp32", placement=placement
    )
    device = next(model.parameters()).device
    losses = []
    for step in batches(2, 1)[:3]:
        x, y = step[0][rank]
        loss = loss_of(model, (x.to(device), y.to(device)))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = [optimizer.full_param(p).tolist() for p in model.parameters()]
    optimizer.close()
    return [losses, parameters]


def devices_taken() -> list[str]:
    """Nobody has called `set_device`: the launcher's number says which device."""
    model = make_model()
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    devices = {str(parameter.device) for parameter in model.parameters()}
    optimizer.close()
    return [*devices, str(torch.accelerator.current_device_index())]


def with_a_device(rank: int, folder: Path) -> dict[str, Any]:
    taken = devices_taken()
    placement = penstock.Placement(params="nvme", grads="cpu", optimizer="cpu", nvme_path=folder)
    return {
        "taken": taken,
        "rows": measured(lambda: rows(rank, lambda: strict(rank), on_device=True)),
        "mixing": measured(lambda: mixing(rank, placement)),
    }


def with_a_cpu(rank: int) -> dict[str, Any]:
    return {"rows": rows(rank, inline, on_device=False), "mixing": mixing(rank, None)}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """Of each rank, all of it from one start: that costs more than the work."""
    return late_ranks(with_a_device, tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    return run_ranks(with_a_cpu, 2)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[f"{changed(how)} | {changed(what)}" for what, how in ROWS])
def test_two_ranks_change_no_bit(found, expected, number):
    for one, other in zip(found, expected, strict=True):
        assert one["rows"][0][number] == other["rows"][number]


def test_what_ranks_tell_each_other_in_backward_is_kept_until_it_was_told(found):
    """And nothing else that is under way on one stream is given up, or used, by another."""
    assert [one["rows"][1] for one in found] == [[], []]


def test_collectives_of_the_user_meet_their_own(found, expected):
    assert [one["mixing"] for one in found] == [(other["mixing"], []) for other in expected]


def test_ranks_take_a_device_each_where_nobody_has_set_one(found):
    assert [one["taken"] for one in found] == [["strict:0", "0"], ["strict:1", "1"]]
