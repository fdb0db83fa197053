"""A life of a model with more in it than steps gives the same bits wherever its state rests, files above all."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD, Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import INPUTS, OUTPUTS, Movement, changed, shares

KIB = 1 << 10
NVME = "nvme"
SMALL = {"tile_bytes": 4 * KIB}
THIRDS = shares(device=0.3, cpu=0.4, nvme=0.3)

#: Each kind on the nvme tier with the others elsewhere.
MOVEMENTS: tuple[tuple[Callable[[], Streams], Movement], ...] = (
    (inline, Movement(3, NVME, NVME, NVME).but(**SMALL)),
    (separate, Movement(3, NVME, NVME, NVME, disks=3).but(tile_bytes=5 * KIB, checksums=False)),
    (separate, Movement(1, optimizer=NVME, overlap="forward").but(**SMALL)),
    (separate, Movement(2, grads=NVME, overlap="none", disks=2).but(**SMALL)),
    (separate, Movement(3, THIRDS, THIRDS, THIRDS).but(**SMALL)),
    (simulated, Movement(3, NVME, "cpu", "cpu", "forward").but(**SMALL)),
)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Of three parts the first is frozen, the last may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 32), nn.Linear(32, OUTPUTS)
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.parts[0].requires_grad_(False)
        self.parts_used = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts[: self.parts_used]:
            x = part(x)
        return self.last(x)


def life(streams: Streams, how: Movement, precision: str = "bf16", optimizer: Any = torch.optim.AdamW) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    prepared = prepare_on(
        streams,
        model,
        optimizer(trained, lr=1e-2),
        stage=how.stage,
        placement=how.placement,
        precision=precision,
        max_grad_norm=1.0,
        overlap=how.overlap,
        options=penstock.Options(**dict(how.options)),
    )
    generator = torch.Generator().manual_seed(4)
    seen: list[Any] = []

    def backward(scale: float = 1.0) -> None:
        x, y = torch.randn(8, INPUTS, generator=generator), torch.randn(8, OUTPUTS, generator=generator)
        loss = (model(x).float() - y).square().mean() * scale
        prepared.backward(loss)
        seen.append(loss.item())

    def step() -> None:
        seen.append(prepared.step().grad_norm)

    backward()
    seen.extend(prepared.full_grad(p).tolist() for p in trained)
    backward()
    step()
    step()  # the same gradients again, at once
    prepared.zero_grad()
    model.parts_used = 2  # the last part gets no gradient: not touched
    backward()
    step()
    prepared.zero_grad()
    backward(float("inf"))
    norm = prepared.step().grad_norm
    seen.append(math.isnan(norm))
    prepared.zero_grad()
    model.parts_used = 3
    with torch.no_grad():
        seen.append(model(torch.ones(1, INPUTS)).tolist())
    prepared.set_full_param(model.last.weight, torch.full((OUTPUTS, 32), 0.25))
    prepared.set_full_param(model.parts[0].up.bias, torch.full((64,), 0.125))
    prepared.set_full_grad(model.parts[1].up.bias, torch.full((64,), 0.5))
    step()
    with prepared.gathered(modify=True), torch.no_grad():
        model.parts[2].down.weight[:3] *= 2
        model.parts[0].down.weight[:3] *= 2
    backward()
    step()
    prepared.load_state_dict(prepared.state_dict())
    prepared.zero_grad()
    backward()
    step()
    seen.extend(prepared.full_param(p).tolist() for p in model.parameters())
    seen.extend(prepared.full_state(p, name).tolist() for p in trained for name in prepared.state_dict()["state"][0])
    prepared.close()
    seen.extend(p.tolist() for p in model.parameters())
    return seen


#: A step without a wait of its own starts from what the one before leaves in files.
AT_ONCE = (
    Movement(3, NVME, NVME, NVME).but(**SMALL),
    Movement(3, "device", "cpu", NVME).but(**SMALL),
    Movement(3, "cpu", NVME, "device", "forward").but(**SMALL, prefetch_bytes=0),
)


@pytest.mark.parametrize(
    ("optimizer", "precision"), [(torch.optim.AdamW, "bf16"), (torch.optim.SGD, "fp32")], ids=["adamw", "no states"]
)
def test_lives_are_the_same(optimizer: Any, precision: str) -> None:
    expected = life(inline(), Movement(), precision, optimizer)
    for streams, how in MOVEMENTS if precision == "bf16" else MOVEMENTS[:6:2]:
        found = life(streams(), how, precision, optimizer)
        assert repr(found) == repr(expected), (streams.__name__, changed(how))  # NaN is NaN


def steps_at_once(streams: Streams, how: Movement) -> list[Any]:
    """Three steps with one gradient: nothing but the next step waits for the last one."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    options = penstock.Options(**dict(how.options))
    stock = torch.optim.AdamW(trained, lr=1e-2)
    optimizer = prepare_on(streams, model, stock, placement=how.placement, overlap="forward", options=options)
    optimizer.backward(model(torch.ones(1, INPUTS)).float().square().sum())
    for _ in range(3):
        optimizer.step()
    found = [optimizer.full_param(p).tolist() for p in trained]
    optimizer.close()
    return found


@pytest.mark.parametrize("how", AT_ONCE, ids=changed)
@pytest.mark.parametrize("slow", [UPLOAD, DOWNLOAD, UPDATE])
def test_a_step_right_after_a_step_starts_from_what_that_leaves(slow: str, how: Movement) -> None:
    streams = SimulatedStreams(lambda stream, nbytes: 0.002 if stream == slow else 0.0)
    assert steps_at_once(streams, how) == steps_at_once(inline(), Movement())
