"""Questions to the planner that take it a moment: small models on machines that come with the package."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.config import Placement
from penstock.planner import plan
from penstock.planner.machine import Machine
from penstock.planner.plan_request import PlanRequest, made, plan_request
from penstock.planner.plans import Plan
from penstock.planner.simulation.simulate import Setup

WIDTH, ROWS = 64, 8
_RATES = ("h2d", "d2h", "host_bandwidth", "update", "disk_read", "disk_write", "flops_bfloat16", "device_bandwidth")


class Net(nn.Module):
    """An embedding, blocks that can be told to compute again, and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.gradient_checkpointing else layer(hidden)
        return self.head(hidden)


class Tellable(Net):
    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        self.gradient_checkpointing = True


def desktop() -> Machine:
    """A desktop that takes long for a small model, so that bytes count and not latencies."""
    machine = Machine.read("rtx4090-desktop")
    slower = {name: machine.value(name) / 1000 for name in _RATES if machine.has(name)}
    return machine.replace(**slower, link_bandwidth=1e7, link_seconds=1e-5, net_bandwidth=1e6, net_seconds=1e-4)


def batch() -> dict[str, Any]:
    return {"ids": torch.zeros(ROWS, 16, dtype=torch.long)}


def asked(model: nn.Module | Callable[[], nn.Module] = Net, **changes: Any) -> PlanRequest:
    """Ask as `plan` does."""
    optimizer, inputs = changes.pop("optimizer", torch.optim.AdamW), changes.pop("batch", batch)
    of_setup = {name: changes.pop(name) for name in ("micro_batches", "hosts") if name in changes}
    setup = Setup(made(model), optimizer, inputs, **{"hosts": 1, **of_setup})
    return plan_request(setup, **{"machine": desktop(), "arguments": {}, **changes})


def planned(model: Any = lambda: Net(), **changes: Any) -> Plan:
    """Plan for a small model on the desktop."""
    optimizer, made = changes.pop("optimizer", torch.optim.AdamW), changes.pop("batch", batch)
    return plan(model, optimizer, made, **{"machine": desktop(), **changes})


ON_HOST = Placement(params="cpu", grads="cpu", optimizer="cpu")
