"""Families on two ranks with data of their own, models that are another one at every step, and ranks that go their way.

Other experts, or no parameter of a unit at all, in any step: plain torch with gradients averaged, at every stage.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib import models
from tests.lib.engines import squared
from tests.lib.models import WIDTH, Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.models.adapters_rows import ADAPTERS
from tests.models.contract import ON_CPU, ON_DEVICE, assert_close, penstock_run, plain_run
from tests.models.family import Backward, Batch, Family, one_loss
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES
from tests.models.transformers_rows import TRANSFORMERS


class Mixture(models.Mixture):
    """Its last expert never gets a token. `idle`: there is no token on this rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width=width)
        self.router.bias.data[-1] = -100.0
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.idle else super().forward(x)


class Layer(nn.Module):
    """`idle`: on this rank it is left out, input and all."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixture = Mixture(width)
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.idle else x + self.mixture(self.norm(x))


def net(recomputes: bool | None = None, order: tuple[int, ...] = (0, 1, 2, 3)) -> Blocks:
    model = Blocks(4, make=Layer, recomputes=recomputes, seed=None)
    model.order = list(order)
    return model


# Which layers are idle, by step and rank. In the last step the second layer is idle on both: it must stay untouched.
IDLE = [((), (0, 1, 2, 3)), ((0,), (3,)), ((1, 2), (1,))]


def idle(part: str | None) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for number, layer in enumerate(model.blocks):
            module = layer if part is None else getattr(layer, part)
            module.idle = number in IDLE[batch.step][batch.rank]
        return squared(model(batch.floats(6, 8)))

    return loss


def accumulated(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """Two micro-batches, the first one without communication at stages 0 and 1."""
    optimizer = getattr(backward, "__self__", None)
    losses = []
    for last in (False, True):
        with nullcontext() if last or optimizer is None else optimizer.no_sync():
            losses.append(idle("mixture")(model, batch))
            backward(losses[-1])
    return [loss.detach() for loss in losses]


def frozen(model: nn.Module, batch: Batch) -> Tensor:
    """In the second step these do not require gradients; in the third they go on from the state that they had."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("blocks.1", "norm", "router", "first.bias")):
            parameter.requires_grad_(batch.step != 1)
    return squared(model(batch.floats(6, 8)))


def ordered(model: nn.Module, batch: Batch) -> Tensor:
    model.order = random.Random(batch.step).sample(range(4), 3)
    return squared(model(batch.floats(6, 8)))


class OutOfLuckError(Exception):
    pass


def failing(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """A forward and a backward that fail, on every rank, and then good ones."""

    def fail(*args: object) -> None:
        raise OutOfLuckError

    for module, watch in ((model.blocks[2], "forward"), (model.first, "full_backward")):
        hook = getattr(module, f"register_{watch}_hook")(fail)
        with pytest.raises(OutOfLuckError):
            backward(squared(model(batch.floats(6, 8))))
        hook.remove()
        model.zero_grad()
    loss = squared(model(batch.floats(6, 8)))
    backward(loss)
    return [loss.detach()]


def family(name: str, units: Any = None, idles: str | None = "mixture", **how: Any) -> Family:
    made = {name: how.pop(name) for name in ("recomputes", "order") if name in how}
    return Family(name, lambda: net(**made), one_loss(idle(idles)), prepare={"units": units, **how})


OWN = [
    family("mixtures idle, units of layers"),
    family("mixtures idle, units of mixtures", (Mixture,)),
    family("mixtures idle, units of layers and mixtures", (Layer, Mixture)),
    family("layers idle, checkpointed", idles=None, recomputes=False),
    family("layers idle, reentrant", idles=None, recomputes=True),
    family("layers idle, used twice", idles=None, order=(0, 0, 1, 1, 2, 2, 3, 3)),
    family("layers idle, updates in backward", idles=None, overlap="backward"),
    Family("mixtures idle, two micro-batches", net, accumulated),
    family("layers idle, nothing gathered ahead", idles=None, options=penstock.Options(prefetch_bytes=0)),
]
SAME_ON_ALL = [
    Family("other layers in another order in every step", net, one_loss(ordered)),
    Family("a forward and a backward that fail", net, failing),
    Family("a layer and parts of others frozen for a step", net, one_loss(frozen)),
]
EXPERTS = [
    Family(f"{f.name}, units of experts", f.build, f.work, prepare={"units": lambda name, _: name.endswith("experts")})
    for f in TRANSFORMERS
    if f.name == "qwen3_moe"
]
#: What one rank alone does not show: parameters without a gradient, several gradients or backwards, statistics, codes.
OF_FAMILIES = (
    *("llama_chunked_tied", "t5", "conv_batch_norm", "tied_by_functional", "block_of_two_names", "every_other_step"),
    *("only_empty", "frozen_parts_of_a_layer_of_the_root", "not_owned", "output_generator", "retained_twice"),
    *("two_forwards_two_backwards", "gradient_penalty", "modules_one_by_one", "lora_on_packed_4_bits"),
)
FAMILIES = [f for f in (*TRANSFORMERS, *MODULES, *GRAPHS, *ADAPTERS) if f.name in OF_FAMILIES]
#: Of each row one in turn.
RUNS_IN_TURN = [
    (3, simulated, ON_CPU),
    (1, separate, ON_DEVICE),
    (3, inline, ON_DEVICE),
    (2, separate, ON_CPU),
    (3, simulated, ON_CPU),
    (0, inline, ON_DEVICE),
    (1, simulated, ON_CPU),
]
GROUPS = {"apart": OWN, "the same on all": [*SAME_ON_ALL, *EXPERTS], "families": FAMILIES}


def compare(rank: int, group: str) -> list[str]:
    failures = []
    for number, row in enumerate(GROUPS[group]):
        plain = plain_run(row, "fp32", world_size=2)
        stage, make, placement = RUNS_IN_TURN[number % len(RUNS_IN_TURN)]
        ours = penstock_run(row, make(), placement, stage, "fp32", rank=rank, world_size=2, look=False)
        if rank > 0:  # the reference kept the losses of the first rank
            ours.observed = plain.observed
        try:
            # Not bit for bit: micro-batches are reduced one by one, plain torch adds them up first.
            assert_close(ours, plain, relative=1e-6)
        except AssertionError as error:
            failures.append(f"{row}, stage {stage}, {make.__name__}: {error}")
    return failures


@pytest.mark.parametrize("group", GROUPS)
def test_ranks_equal_plain_torch_with_averaged_gradients(group: str) -> None:
    failures = [failure for of_rank in run_ranks(compare, 2, group) for failure in of_rank]
    assert not failures, "\n\n".join(failures)
