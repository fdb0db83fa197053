"""A model without most of its equal blocks does what the whole one does: its program is the same, item by item."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.config import Options, Placement, Tier
from penstock.planner.machine import Machine
from penstock.planner.simulation import simulate as module
from penstock.planner.simulation.program import Program, WorkKind
from penstock.planner.simulation.repeat import Whole
from penstock.planner.simulation.simulate import Simulation, simulate
from tests.lib.planning import Net, Tellable, asked

BLOCKS = 16
ON_CPU = Placement(params="cpu", grads="cpu", optimizer="cpu")
IN_FILES = Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path="nvme0")
NOTHING_AHEAD = Options(prefetch_bytes=0, tile_bytes=4096)


def shares(device: float, **others: float) -> dict[str, float]:
    return {"device": device, "cpu": 1 - device - sum(others.values()), **others}


class Unlike(nn.Module):
    """Blocks that do more and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = ids.float().repeat(1, 4)
        for number, layer in enumerate(self.layers):
            for _ in range(number):
                hidden = hidden.relu()
            hidden = layer(hidden)
        return hidden


class Indexed(Unlike):
    """Blocks that are taken by their number."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = ids.float().repeat(1, 4)
        for number in range(BLOCKS):
            hidden = self.layers[number](hidden)
        return hidden


def looked_at(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], placement: Placement, **given: Any
) -> tuple[Simulation, Simulation, bool]:
    """Simulate a shortened model, and the whole one; say whether the first one was enough."""
    recompute = given.pop("recompute", False)
    sizes = {name: given.pop(name) for name in ("micro_batches", "world_size") if name in given}
    machine = Machine.read(given.pop("machine", "rtx4090-desktop"))
    arguments = {"options": NOTHING_AHEAD, "precision": "bf16", **given}
    request = asked(model, machine=machine, arguments=arguments, **sizes)
    setup = module.replace(request.setup, recompute=recompute)
    prepared = request.request(placement, streamed=0.0)
    ran: list[Whole | None] = []

    def noted(setup: Any, request: Any, steps: int, whole: Whole | None) -> Simulation:
        ran.append(whole)
        return simulated(setup, request, steps, whole)

    simulated = module._simulate
    monkeypatch.setattr(module, "_simulate", noted)
    found = simulate(setup, prepared)
    monkeypatch.setattr(module, "_whole", lambda *_: None)
    return found, simulate(setup, prepared), ran[:-1] == [ran[0]] and ran[0] is not None


def told(program: Program) -> list[object]:
    """Spell a program out."""
    found: list[object] = []
    for item in program.items:
        of: object = item.index
        if item.kind is WorkKind.COMPUTE:
            of = {program.ops[number]: count for number, count in program.segments[item.index]}
        elif item.kind in (WorkKind.SUBMIT, WorkKind.WAIT, WorkKind.HOST_WAIT):
            job = program.jobs[item.index]
            of = job._replace(segment=()), {program.ops[number]: count for number, count in job.segment}
        found.append((item.kind, item.label, of))
    return found


def same(one: Simulation, other: Simulation) -> None:
    assert told(one.program) == told(other.program)
    assert one.program.steps == other.program.steps
    assert one.phases == other.phases
    assert one.program.peak_bytes == other.program.peak_bytes
    assert one.activation_bytes == other.activation_bytes
    for tier in Tier:
        assert one.budget.on(tier).parts == other.budget.on(tier).parts
    assert one.recipes.keys() == other.recipes.keys()


def everywhere(device: float, grads: float | None = None, optimizer: float | None = None) -> Placement:
    """Such shares of parameters, gradients and optimizer states on the device, and the rest in host memory."""
    return Placement(
        params=shares(device),
        grads="cpu" if grads is None else shares(grads),
        optimizer=shares(device if optimizer is None else optimizer),
    )


REPEATED: dict[str, tuple[Placement, dict[str, Any]]] = {
    "device": (Placement(), {}),
    "cpu": (ON_CPU, {}),
    "on a cpu": (ON_CPU, {"machine": "cpu-laptop"}),
    "three micro-batches": (ON_CPU, {"micro_batches": 3}),
    "eight ranks": (ON_CPU, {"machine": "h100-node", "world_size": 8}),
    "cut": (everywhere(0.2, 0.2, 0.15), {"max_grad_norm": 1.0}),
    "recomputed": (ON_CPU, {"recompute": True}),
    "the host and the device in turns": (everywhere(0.5), {}),
    "each updates its own": (everywhere(0.5, 0.5), {}),
}


@pytest.mark.parametrize(("placement", "given"), REPEATED.values(), ids=REPEATED)
def test_the_program_is_that_of_the_whole_model(
    placement: Placement, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (lambda: Tellable(BLOCKS)) if given.get("recompute") else (lambda: Net(BLOCKS))
    found, whole, enough = looked_at(monkeypatch, model, placement, **given)
    same(found, whole)
    assert enough


AWAY = Placement(optimizer="cpu", grads="cpu", activations="cpu")
WHOLE: dict[str, tuple[Callable[[], nn.Module], Placement, Options]] = {
    "blocks that do more and more": (Unlike, ON_CPU, NOTHING_AHEAD),
    "blocks by their numbers": (Indexed, ON_CPU, NOTHING_AHEAD),
    "more is ahead than there is": (lambda: Net(BLOCKS), ON_CPU, Options(tile_bytes=4096)),
    "rings of files hold more than there is": (lambda: Net(BLOCKS), IN_FILES, NOTHING_AHEAD),
    "activations": (lambda: Net(BLOCKS), AWAY, NOTHING_AHEAD),
}


@pytest.mark.parametrize(("model", "placement", "options"), WHOLE.values(), ids=WHOLE)
def test_what_is_unlike_or_reaches_over_many_blocks_is_simulated_whole(
    model: Callable[[], nn.Module], placement: Placement, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, whole, enough = looked_at(monkeypatch, model, placement, options=options)
    same(found, whole)
    assert not enough
