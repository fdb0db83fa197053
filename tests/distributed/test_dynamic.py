"""Families on two ranks with data of their own, models that are another one at every step, and ranks that go their way.

Other experts, or no parameter of a unit at all, in any step: plain torch with gradients averaged, at every stage.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from tests.lib.engines import squared
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.models.adapters_rows import ADAPTERS
from tests.models.contract import ON_CPU, ON_DEVICE, assert_close, penstock_run, plain_run
from tests.models.family import Backward, Batch, Family, one_loss
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES
from tests.models.transformers_rows import TRANSFORMERS

WIDTH = 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to one of three experts; a fourth never gets one. `idle`: there is no token on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        if self.idle:
            return torch.zeros_like(x)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, None])
        return out


class Layer(nn.Module):
    """`idle`: on this rank it is left out, input and all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.idle else x + self.mixture(self.norm(x))


class Net(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.run = run
        self.order: Sequence[int] = range(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.run(self.layers[number], x)
        return x


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "checkpointed": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "twice": lambda layer, x: layer(layer(x)),
}

# Which layers are idle, by step and rank. In the last step the second layer is idle on both: it must stay untouched.
IDLE = [((), (0, 1, 2, 3)), ((0,), (3,)), ((1, 2), (1,))]


def idle(part: str | None) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for number, layer in enumerate(model.layers):
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


def frozen(*names: str) -> Callable[[nn.Module, Batch], Tensor]:
    """In the second step these do not require gradients; in the third they go on from the state that they had."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.requires_grad_(batch.step != 1)
        return squared(model(batch.floats(6, 8)))

    return loss


def ordered(count: int) -> Callable[[nn.Module, Batch], Tensor]:
    """So many layers, in an order of the step's own."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        model.order = random.Random(batch.step).sample(range(4), count)
        return squared(model(batch.floats(6, 8)))

    return loss


class OutOfLuckError(Exception):
    pass


def failing(model: nn.Module, batch: Batch, backward: Backward) -> list[Tensor]:
    """A forward and a backward that fail, on every rank, and then good ones."""

    def fail(*args: object) -> None:
        raise OutOfLuckError

    for module, watch in ((model.layers[2], "forward"), (model.first, "full_backward")):
        hook = getattr(module, f"register_{watch}_hook")(fail)
        with pytest.raises(OutOfLuckError):
            backward(squared(model(batch.floats(6, 8))))
        hook.remove()
        model.zero_grad()
    loss = squared(model(batch.floats(6, 8)))
    backward(loss)
    return [loss.detach()]


def family(name: str, units: Any = None, run: str = "plain", idles: str | None = "mixture", **prepare: Any) -> Family:
    return Family(name, lambda: Net(RUNS[run]), one_loss(idle(idles)), prepare={"units": units, **prepare})


OWN = [
    family("mixtures idle, units of layers"),
    family("mixtures idle, units of mixtures", (Mixture,)),
    family("mixtures idle, units of layers and mixtures", (Layer, Mixture)),
    family("layers idle", idles=None),
    family("layers idle, checkpointed", run="checkpointed", idles=None),
    family("mixtures idle, reentrant", run="reentrant"),
    family("layers idle, reentrant", run="reentrant", idles=None),
    family("layers idle, used twice", run="twice", idles=None),
    family("layers idle, updates in backward", idles=None, overlap="backward"),
    Family("mixtures idle, two micro-batches", lambda: Net(RUNS["plain"]), accumulated),
    family("layers idle, nothing gathered ahead", idles=None, options=penstock.Options(prefetch_bytes=0)),
]
SAME_ON_ALL = [
    Family("another order in every step", lambda: Net(RUNS["plain"]), one_loss(ordered(4))),
    Family("layers skipped at random", lambda: Net(RUNS["plain"]), one_loss(ordered(2))),
    Family("a forward and a backward that fail", lambda: Net(RUNS["plain"]), failing),
    Family("a layer frozen for a step", lambda: Net(RUNS["plain"]), one_loss(frozen("layers.1"))),
    Family("parts frozen for a step", lambda: Net(RUNS["plain"]), one_loss(frozen("norm", "router", "first.bias"))),
]
EXPERTS = [
    Family(f"{f.name}, units of experts", f.build, f.work, prepare={"units": lambda name, _: name.endswith("experts")})
    for f in TRANSFORMERS
    if f.name == "qwen3_moe"
]
#: What one rank alone does not show: parameters without a gradient, several gradients or backwards, statistics, codes.
OF_FAMILIES = (
    *("llama_chunked_tied", "t5", "mixtral", "conv_batch_norm", "tied_by_functional", "block_of_two_names"),
    *("every_other_step", "only_empty", "frozen_parts_of_a_layer_of_the_root", "not_owned", "output_generator"),
    *("views_of_input", "side_losses", "two_losses", "two_forwards_two_backwards", "evaluation_in_between"),
    *("retained_twice", "accumulated", "parameter_gradient_in_between", "gradient_penalty", "modules_one_by_one"),
    *("lora_on_packed_4_bits", "peft_llama"),
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
