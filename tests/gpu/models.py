"""A small transformer-like model, and the plain torch loop it is compared with."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.models import Blocks

EVERYTHING_ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Block(nn.Module):
    """Norm, wide linear, narrow linear, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to [batch, width]."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def is_emulated() -> bool:
    """Whether the device is that of tests/emulation: values and memory are as on a GPU, time and overlap are not."""
    return "EMULATION" in os.environ


def build(width: int = 64, depth: int = 4) -> Blocks:
    """The model with the same weights every time, on the cpu; every weight is a bf16 value."""
    model = Blocks(depth, width, inputs=16, outputs=8, make=Block)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def batches(count: int, device: torch.device, size: int = 32) -> list[Tensor]:
    """Inputs, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=generator).to(device) for _ in range(count)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A scalar that depends on every output."""
    return model(x).float().square().mean()


def take_step(model: nn.Module, optimizer: penstock.Optimizer, x: Tensor) -> Tensor:
    """Train on one batch; the loss, on its device."""
    loss = loss_of(model, x)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **HYPER)


def train(
    streams: Streams,
    device: torch.device,
    placement: penstock.Placement | None = None,
    *,
    rule: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    before: Callable[[nn.Module], object] = lambda model: None,
    clip: Callable[[nn.Module, penstock.Optimizer], Tensor] | None = None,
    between: Callable[[nn.Module, penstock.Optimizer, int], object] = lambda model, optimizer, step: None,
    size: int = 32,
    **rest: Any,
) -> list[Tensor]:
    """Losses, norms and parameters of three steps.

    Arguments:
        before: changes the model before it is prepared.
        between: is called after each step.
    """
    model = build()
    before(model)
    optimizer = prepare_on(streams, model, rule(model), placement=placement, **rest)
    values = []
    for step, x in enumerate(batches(3, device, size=size)):
        loss = loss_of(model, x)
        optimizer.backward(loss)
        if clip is not None:
            values.append(clip(model, optimizer).clone())
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
        between(model, optimizer, step)
    found = [*(value.cpu() for value in values), *(optimizer.full_param(p) for p in model.parameters())]
    optimizer.close()
    return found


class _Late(torch.autograd.Function):
    """The identity, after a while of work on the device's current stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        work_a_while(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        work_a_while(grad.device)
        return grad.clone()


def work_a_while(device: torch.device) -> None:
    """Keep the device's current stream busy for about a millisecond, and the host for none of it."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    if sleep is not None:
        sleep(2_000_000)  # cycles
    else:
        torch.ones(128, 128, device=device) @ torch.ones(128, 128, device=device)


def slow_down(model: Blocks) -> None:
    """Each block takes a while in both directions: whoever does not wait for it reads what was there before."""
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: _Late.apply(output))


@dataclass
class Outcome:
    """What a run left behind.

    Attributes:
        losses: of every micro-batch.
        norms: of every step.
        first_gradients: of the first step.
        first_parameters: after the first step, fp32.
        parameters: at the end, fp32.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first_gradients: list[Tensor] = field(default_factory=list)
    first_parameters: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    """Equal bit by bit; the message says how far apart they are."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            mine, other, rtol=0, atol=0, equal_nan=True, msg=lambda text, n=number: f"{what}, tensor {n}: {text}"
        )


def plain_run(precision: str, accumulation: int, clip: float | None, steps: int, device: torch.device) -> Outcome:
    """The same loop in plain torch: weights in the compute dtype, fp32 masters, torch's own AdamW and clipping."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = build().to(device, dtype)
    weights = list(model.parameters())
    masters = [w.detach().float().clone() for w in weights]
    optimizer = torch.optim.AdamW(masters, foreach=False, **HYPER)
    outcome = Outcome()
    data = iter(batches(steps * accumulation, device))
    for step in range(steps):
        for _ in range(accumulation):
            loss = loss_of(model, next(data).to(dtype))
            loss.backward()
            outcome.losses.append(loss.item())
        if step == 0:
            outcome.first_gradients = [w.grad.float().cpu().clone() for w in weights]  # clipping works in place
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or float("inf"))
        outcome.norms.append(norm.item())
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        if step == 0:
            outcome.first_parameters = [m.detach().cpu().clone() for m in masters]
    outcome.parameters = [m.detach().cpu() for m in masters]
    return outcome
