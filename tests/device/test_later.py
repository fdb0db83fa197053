"""What comes after `prepare`, on the strict device: averages, and parameters that are trained later."""

from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.runtime.streams import Streams
from tests.device.running import strict
from tests.lib.engines import prepare_on
from tests.lib.streams import inline
from tests.parity.rows import Movement, batches, changed, loss_of
from tests.parity.test_unfreezing import make, stock, unfreeze_a_block, unfreeze_a_layer
from tests.support import thorough

KIB = 1 << 10
CHANGES = {1: unfreeze_a_block, 2: unfreeze_a_layer}
ON_CPU = Movement(3, "cpu", "cpu", "cpu")


def run(how: Movement, streams: Streams, tier: Any) -> list[list[float]]:
    """The parameters, their average, and what the model computes with it."""
    model = make().to(streams.device)
    optimizer = prepare_on(
        streams,
        model,
        stock(model),
        placement=how.placement,
        overlap=how.overlap,
        options=penstock.Options(tile_bytes=4 * KIB),
    )
    ema = penstock.EMA(optimizer, 0.5, tier=tier)
    found: list[Tensor] = []
    for step in range(4):
        if step in CHANGES:
            optimizer.add_param_group({"params": CHANGES[step](model), "lr": 1e-3})
        x, y = (tensor.to(streams.device) for tensor in batches(1, 1)[step][0][0])
        optimizer.backward(loss_of(model, (x, y)))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    with ema.applied(), torch.no_grad():
        found += [model(x).cpu(), *(optimizer.full_param(p) for p in model.parameters())]
    found += [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return [tensor.float().flatten().tolist() for tensor in found]


@pytest.mark.parametrize(
    ("how", "tier"),
    [
        (ON_CPU, "device"),
        thorough(Movement(3), "device"),
        thorough(Movement(3), "cpu"),
        thorough(Movement(3, optimizer="cpu", overlap="forward"), "cpu"),
        thorough(ON_CPU, "cpu"),
        thorough(Movement(3, "nvme", "cpu", "nvme"), "nvme"),
        thorough(Movement(3, "nvme", "cpu", "nvme"), "device"),
    ],
    ids=lambda value: changed(value) if isinstance(value, Movement) else value,
)
def test_averages_and_unfreezing_change_no_bit(how: Movement, tier: str) -> None:
    assert run(how, strict(), tier) == run(Movement(3), inline(), "device")
