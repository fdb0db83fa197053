"""Training whose memory is measured, and compared with what was counted before any of it was taken."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock import Options, Placement, memory_budget
from penstock.engine.gradients.reduce import BufferRing
from tests.lib.engines import prepare_on, squared

KIB = 1 << 10
SHARES = {"device": 0.5, "cpu": 0.5}
PLACEMENTS = [
    ("device", "device", "device"),
    ("cpu", "cpu", "cpu"),
    ("device", "cpu", "cpu"),
    ("cpu", "device", "device"),
    ("nvme", "nvme", "nvme"),
    (SHARES, {"device": 0.3, "cpu": 0.7}, {"device": 0.5, "nvme": 0.5}),
]


def deep(width: int = 64, depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 8))


class Watch:
    """The most that the buffers of gradients took at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peak, self.now = 0, 0
        allocate, give_back = BufferRing.allocate, BufferRing.give_back
        allocated: dict[int, int] = {}

        def watched(ring: BufferRing, numel: int, dtype: torch.dtype) -> torch.Tensor:
            buffer = allocate(ring, numel, dtype)
            allocated[id(buffer)] = buffer.nbytes
            self.peak = max(self.peak, ring.nbytes + sum(allocated.values()))
            return buffer

        def returned(ring: BufferRing, buffer: torch.Tensor, event: Any) -> None:
            allocated.pop(id(buffer), None)
            give_back(ring, buffer, event)

        patch.setattr(BufferRing, "allocate", watched)
        patch.setattr(BufferRing, "give_back", returned)


def measured(
    stage: int,
    precision: str,
    placement: Placement,
    streams: Any,
    accumulation: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Train, and compare what there was at the most with what was counted before."""
    model = deep()
    counted: list[memory_budget.MemoryBudget] = []
    with pytest.MonkeyPatch.context() as patch:
        count = memory_budget.budget_of
        patch.setattr(memory_budget, "budget_of", lambda *given: counted.append(count(*given)) or counted[-1])
        watch = Watch(patch)
        optimizer = prepare_on(
            streams,
            model,
            torch.optim.AdamW(model.parameters()),
            stage=stage,
            precision=precision,
            placement=placement,
            grad_accumulation_dtype=accumulation,
            options=Options(tile_bytes=4 * KIB, **options),
        )
        (budget,) = counted
        for _ in range(2):
            for _ in range(2):
                optimizer.backward(squared(model(torch.ones(2, 64))))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert optimizer._engine is not None
        gathered = optimizer._engine.gatherer.peak_live_bytes
        table = optimizer.locations()
        at_rest = table.bytes(tier="device") - table.bytes(kind="gathered")
        optimizer.close()
    need = budget.device
    parts = need.parts
    assert at_rest == sum(parts[what] for what in ("params", "grads", "optimizer", "tiles"))
    assert gathered <= parts["gathered"] <= 2 * gathered
    # A few of each size are counted, of which a device without delays needs one.
    assert watch.peak <= parts["gradients on their way"]
    largest = max(p.numel() for p in model.parameters()) * (4 if precision == "fp32" else 2)
    assert parts["gradients on their way"] <= 2 * watch.peak + largest
