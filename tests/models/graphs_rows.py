"""Outputs of every shape, and graphs that are more than one forward and one backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.lib.models import Opaque
from tests.models.family import Backward, Batch, Family, one_loss
from tests.models.modules_rows import WIDTH, Block, Stack, on_floats, squared
from tests.models.transformers_rows import t5


@dataclass
class Record:
    hidden: Tensor
    note: str = "x"


class Pair(NamedTuple):
    hidden: Tensor
    other: Tensor


class Box:
    """Holds tensors in its attributes."""

    def __init__(self, hidden: Tensor) -> None:
        self.inner = {"hidden": hidden}


PACKINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "nested": (lambda t: {"a": [(t, "x"), [None]]}, lambda o: o["a"][0][0]),
    "dataclass": (Record, lambda o: o.hidden),
    "named_tuple": (lambda t: Pair(t, t.detach()), lambda o: o.hidden),
    "object": (Box, lambda o: o.inner["hidden"]),
    "object_beside_tensor": (lambda t: (t.detach(), Box(t)), lambda o: o[1].inner["hidden"]),
    "closed_object": (Opaque, lambda o: o.get()),
    "closed_object_beside_tensor": (lambda t: (t.detach().requires_grad_(), Opaque(t)), lambda o: o[1].get()),
    "generator": (lambda t: (item for item in (t,)), next),
}


class Packing(nn.Module):
    """A block whose output is not a plain tensor."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.block(x))


class Packed(Stack):
    """Blocks with such outputs inside a model with such an output."""

    def __init__(self, packing: str) -> None:
        pack, self.unpack = PACKINGS[packing]
        self.pack = pack
        super().__init__([Packing(pack) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.unpack(block(x))
        return self.pack(self.last(x))


def packed(packing: str) -> Family:
    unpack = PACKINGS[packing][1]
    return Family(
        f"output_{packing}",
        lambda: Packed(packing),
        one_loss(lambda model, batch: squared(unpack(model(batch.floats(4, 8))))),
    )


class OnlyHandsThrough(Stack):
    """A trained block whose only output is its input."""

    def __init__(self) -> None:
        super().__init__([Block(), nn.Linear(WIDTH, WIDTH), Block()])
        self.blocks[1].forward = lambda x: x


class InPlaceByCaller(Stack):
    """What comes out of a block is modified in place."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5).add_(1.0)
        return x


class InPlaceInBlock(nn.Module):
    """A block that adds to its input in place and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(torch.tanh(self.up(x.clone()))))


class ViewBlock(nn.Module):
    """Outputs that are views of what the block made, or of its input."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.down(torch.tanh(self.up(x))[:, WIDTH:]).view(-1, 2, WIDTH // 2)
        return made[:, 0], (x if self.of_input else made.flatten(1))[:, : WIDTH // 2]


class Views(Stack):
    def __init__(self, of_input: bool, in_place: bool) -> None:
        super().__init__([ViewBlock(of_input) for _ in range(3)])
        self.in_place = in_place

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            a, b = block(x)
            if self.in_place:
                a.mul_(2.0)
                b.sub_(1.0)
            x = torch.cat([a, b], dim=1)
        return x


class OneViewInPlace(Stack):
    """The one output of a block is a view, and is modified in place."""

    def __init__(self) -> None:
        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, WIDTH // 2)))

        super().__init__([block() for _ in range(3)])

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(2.0)
            x = torch.tanh(x).flatten(1)
        return x


class SideBlock(nn.Module):
    """Leaves a loss of its own in an attribute, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.side = self.router(x).float().softmax(-1).square().mean()
        return x + torch.tanh(self.mix(x))


def side_losses(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    loss = squared(model(batch.floats(4, 8))) + sum(block.side for block in model.blocks)
    backward(loss)
    return [loss.detach()]


def two_losses(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """One graph, two losses, one backward each."""
    out = model(batch.floats(4, 8))
    first, second = out[:, :2].float().square().mean(), out[:, 2:].float().abs().mean()
    backward(first, retain_graph=True)
    backward(second)
    return [first.detach(), second.detach()]


def two_forwards(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """Two forwards before one backward, as contrastive losses do."""
    a, b = model(batch.floats(4, 8)), model(batch.floats(4, 8))
    loss = squared(a - 0.5 * b)
    backward(loss)
    return [loss.detach()]


def two_forwards_two_backwards(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """Both forwards first; the later graph is run backward last."""
    losses = [squared(model(batch.floats(4, 8))), squared(model(batch.floats(4, 8)))]
    for loss in losses:
        backward(loss)
    return [loss.detach() for loss in losses]


def retained_twice(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """The same graph three times."""
    loss = squared(model(batch.floats(4, 8)))
    backward(loss, retain_graph=True)
    backward(loss, retain_graph=True)
    backward(loss)
    return [loss.detach()]


def gradients_in_between(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """`autograd.grad` of the input, and of a parameter, between forward and backward: they go to the caller alone."""
    x = batch.floats(4, 8).requires_grad_()
    loss = squared(model(x))
    (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, model.blocks[0].up.weight, retain_graph=True)
    backward(loss)
    return [loss.detach(), of_input, of_weight.detach().clone()]


class Forces(Stack):
    """Calls `autograd.grad` inside its forward, as models of molecules do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(self.body(self.first(x))).float().square().sum()
        (force,) = torch.autograd.grad(energy, x)
        return super().forward(x.detach() + 0.1 * force)


class TrainedForces(Stack):
    """An energy, and forces that the loss is about too: their backward is a backward of a backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).float().square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force


def energy_and_forces(model: nn.Module, batch: Batch) -> Tensor:
    energy, force = model(batch.floats(4, 8))
    return energy + squared(force)


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """As critics of generative models are regularised."""
    x = batch.floats(4, 8).requires_grad_()
    out = model(x)
    (of_input,) = torch.autograd.grad(squared(out), x, create_graph=True)
    return squared(out) + squared(of_input)


def evaluation_in_between(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """Before a forward, and between forward and backward, in both modes that record nothing."""
    with torch.inference_mode():
        before = float(squared(model(batch.floats(4, 8))))
    loss = squared(model(batch.floats(4, 8)))
    with torch.inference_mode():
        between = float(squared(model(batch.floats(4, 8))))
    with torch.no_grad():
        other = squared(model(batch.floats(4, 8)))
    backward(loss)
    return [loss.detach(), torch.tensor([before, between]), other]


def autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squared(model(batch.floats(4, 8)))


def forward_called_directly(model: nn.Module, batch: Batch) -> Tensor:
    """Past the hooks of the model; those of its layers see the call."""
    return squared(model.forward(batch.floats(4, 8)))


def first_half_alone(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """Modules of the model called one by one; the model itself never is."""
    loss = squared(model.last(model.blocks[1](model.blocks[0](model.first(batch.floats(4, 8))))))
    backward(loss)
    return [loss.detach()]


def encoder_alone(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """T5's encoder by itself, then the whole model."""
    loss = squared(model.get_encoder()(input_ids=batch.ids(32, 2, 6)).last_hidden_state)
    backward(loss)
    whole = model(input_ids=batch.ids(32, 2, 6), labels=batch.ids(32, 2, 4)).loss
    backward(whole)
    return [loss.detach(), whole.detach()]


GRAPHS = [
    *map(packed, PACKINGS),
    Family("only_hands_through", OnlyHandsThrough, on_floats(4, 8)),
    Family("in_place_by_caller", InPlaceByCaller, on_floats(4, 8)),
    Family("in_place_in_block", lambda: Stack([InPlaceInBlock() for _ in range(3)]), on_floats(4, 8)),
    Family("views_of_made", lambda: Views(of_input=False, in_place=False), on_floats(4, 8)),
    Family("views_of_input", lambda: Views(of_input=True, in_place=False), on_floats(4, 8)),
    Family("views_modified_in_place", lambda: Views(of_input=False, in_place=True), on_floats(4, 8)),
    Family("one_view_modified_in_place", OneViewInPlace, on_floats(4, 8)),
    Family("side_losses", lambda: Stack([SideBlock() for _ in range(3)]), side_losses),
    Family("two_losses", Stack, two_losses),
    Family("two_forwards", Stack, two_forwards),
    Family("two_forwards_two_backwards", Stack, two_forwards_two_backwards),
    Family("retained_twice", Stack, retained_twice),
    Family("gradients_in_between", Stack, gradients_in_between),
    Family("gradient_inside_forward", Forces, on_floats(4, 8)),
    Family("evaluation_in_between", Stack, evaluation_in_between),
    Family("autocast", Stack, one_loss(autocast)),
    Family("forward_called_directly", Stack, one_loss(forward_called_directly)),
    Family("trained_forces", TrainedForces, one_loss(energy_and_forces)),
    Family("gradient_penalty", Stack, one_loss(gradient_penalty)),
    Family("modules_one_by_one", Stack, first_half_alone),
    Family("encoder_alone", t5, encoder_alone),
]
