"""Two ranks, each with a strict device: collectives run late, on the stream they were issued from."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from tests.device.running import late_ranks, strict
from tests.parity.rows import Arithmetic, Movement, Net, batches, changed, loss_of, shares, train
from tests.parity.test_simulated import everything
from tests.support import inline, run_ranks, thorough

STEPS = 2
KIB = 1 << 10
SUMMED = Arithmetic(precision="bf16", accumulation=2, clip=0.5)
UNCLIPPED = Arithmetic(precision="bf16", accumulation=2, no_sync=True)
ROWS = [
    (SUMMED, Movement(3)),
    (SUMMED, Movement(3, "cpu", "cpu", "cpu")),
    (SUMMED, Movement(1, "device", "cpu", "cpu")),
    (UNCLIPPED, Movement(3, "cpu", "cpu", "cpu", overlap="backward")),
    (UNCLIPPED, Movement(3, "device", "device", "cpu", overlap="backward")),
    (SUMMED, Movement(3, "nvme", "cpu", "nvme")),
    (SUMMED, Movement(3, "cpu", shares(device=0.35, cpu=0.65), "cpu").but(tile_bytes=4 * KIB)),
    (SUMMED, Movement(2, "cpu", "cpu", "cpu").but(streamed_updates=0.5, tile_bytes=4 * KIB)),
    (UNCLIPPED, Movement(1, "cpu", "cpu", "cpu")),
]


def on_strict(rank: int, work: Callable[[int], Any]) -> tuple[Any, list[str]]:
    """The work's result on this rank's device, and what was wrong there."""
    from tests.device.backend import native

    native.configure(rank, 0.005, True)
    torch.accelerator.set_device_index(rank)
    result = work(rank)
    torch.accelerator.synchronize()
    return result, native.take_races()


def rows_on_strict(rank: int, rows: list[tuple[Arithmetic, Movement]]) -> tuple[Any, list[str]]:
    def train_all(rank: int) -> list[list[object]]:
        common = {"rank": rank, "world_size": 2, "steps": STEPS}
        return [everything(train(what, how, streams=strict(rank), **common)) for what, how in rows]

    return on_strict(rank, train_all)


def rows_on_cpu(rank: int, rows: list[tuple[Arithmetic, Movement]]) -> list[list[object]]:
    common = {"rank": rank, "world_size": 2, "steps": STEPS, "streams": inline()}
    return [everything(train(what, Movement(how.stage), **common)) for what, how in rows]


def test_two_ranks_change_no_bit():
    """Also where ranks tell each other in backward whether a gradient is finite: what they say is kept until then."""
    expected = run_ranks(rows_on_cpu, 2, ROWS)
    found = late_ranks(rows_on_strict, ROWS)
    for rank, (values, races) in enumerate(found):
        assert races == []
        different = [
            f"{changed(w)} | {changed(h)}" for (w, h), a, b in zip(ROWS, values, expected[rank], strict=True) if a != b
        ]
        assert different == []


class Mixing(nn.Module):
    """A batch norm over ranks, by the user's own collective in forward, and another one in backward."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        x = x - mean / 2
        if x.requires_grad:
            x.register_hook(self.sum_over_ranks)
        return x

    def sum_over_ranks(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / 2


def mixing(rank: int, placement: penstock.Placement | None) -> list[list[float]]:
    """Losses of a model whose blocks talk to other ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Net()
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


def mixing_on_strict(rank: int, placement: penstock.Placement) -> tuple[Any, list[str]]:
    return on_strict(rank, lambda rank: mixing(rank, placement))


@pytest.mark.parametrize("params", ["cpu", thorough("device"), "nvme"])
def test_collectives_of_the_user_meet_their_own(params, tmp_path):
    expected = run_ranks(mixing, 2, None)
    placement = penstock.Placement(params=params, grads="cpu", optimizer="cpu", nvme_path=tmp_path)
    found = late_ranks(mixing_on_strict, placement)
    assert found == [(values, []) for values in expected]


def devices_taken(rank: int) -> list[str]:
    """Nobody has called `set_device`: the launcher's number says which device."""
    model = Net()
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    devices = {str(parameter.device) for parameter in model.parameters()}
    optimizer.close()
    return [*devices, str(torch.accelerator.current_device_index())]


def test_ranks_take_a_device_each_where_nobody_has_set_one():
    assert late_ranks(devices_taken) == [["strict:0", "0"], ["strict:1", "1"]]


def refused_on_one_device(rank: int) -> str:
    torch.accelerator.set_device_index(1)
    model = Net()
    with suppress(penstock.ConfigError):
        penstock.prepare(model, torch.optim.AdamW(model.parameters()))
        return "not refused"
    return "refused"


def test_two_ranks_on_one_device_are_refused():
    assert late_ranks(refused_on_one_device) == ["refused", "refused"]
