"""A model with every form of parameter that a rule over whole ones meets, and runs of it: ours, and plain torch's."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.optim import MuonAdamW
from penstock.rules.formats import COMPUTE_DTYPES
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline
from tests.parity.rows import Movement, round_half_away

STEPS, BATCH, VOCABULARY, WIDTH = 2, 4, 24, 16
OPTIONS: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.05, "adamw_lr": 1e-2}


class Block(nn.Module):
    """Matrices of three sizes, one of them by itself; a stack of matrices; vectors; a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH) / 8)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.o(torch.tanh(self.q(y)) * self.k(y)) + self.down(torch.relu(self.up(y)))
        y = y + torch.einsum("bsw,ewh->bsh", y, self.experts)[..., :WIDTH]
        return x + self.fixed(y) + self.small(y).sum(-1, keepdim=True)


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def first_model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model()


def batches(world_size: int, accumulation: int, steps: int) -> list[list[list[Tensor]]]:
    """Rows of ids by step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(9)
    return [
        [
            [torch.randint(0, VOCABULARY, (BATCH, 6), generator=generator) for _ in range(world_size)]
            for _ in range(accumulation)
        ]
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def muon(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return MuonAdamW(model, **OPTIONS, **options)


Make = Callable[[nn.Module], torch.optim.Optimizer]
Outcome = dict[str, list[Any]]


def prepared(
    how: Movement, make: Make = muon, streams: Streams | None = None, precision: str = "fp32", **rest: Any
) -> tuple[nn.Module, penstock.Optimizer]:
    model = deepcopy(first_model())
    optimizer = prepare_on(
        streams or inline(),
        model,
        make(model),
        stage=how.stage,
        placement=how.placement,
        overlap=how.overlap,
        precision=precision,
        options=penstock.Options(**{"rounding": "nearest", **dict(how.options)}),
        **rest,
    )
    return model, optimizer


def train(
    how: Movement,
    *,
    make: Make = muon,
    streams: Streams | None = None,
    rank: int = 0,
    world_size: int = 1,
    precision: str = "fp32",
    accumulation: int = 1,
    steps: int = STEPS,
    between: Callable[[penstock.Optimizer, int], object] = lambda optimizer, step: None,
    initial_loss_scale: float | None = None,
    **rest: Any,
) -> Outcome:
    """Losses and norms of each step, and all parameters and states afterwards."""
    if initial_loss_scale is not None:
        how = how.but(initial_loss_scale=initial_loss_scale)
    streams = streams or inline()
    model, optimizer = prepared(how, make, streams, precision, **rest)
    outcome: Outcome = {"loss": [], "norm": []}
    for step, micro_batches in enumerate(batches(world_size, accumulation, steps)):
        for ranks in micro_batches:
            loss = loss_of(model, ranks[rank].to(streams.device))
            outcome["loss"].append(loss.item())
            optimizer.backward(loss / accumulation)
        outcome["norm"].append(optimizer.step().grad_norm)
        optimizer.zero_grad()
        between(optimizer, step)
    outcome |= state_of(model, optimizer)
    optimizer.close(keep_params=False)
    return outcome


def state_of(model: nn.Module, optimizer: penstock.Optimizer) -> Outcome:
    """All parameters and states."""
    found: Outcome = {name: [optimizer.full_param(p)] for name, p in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    trained = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for name, p in model.named_parameters():
        if p.requires_grad:
            kept = states.get(trained.index(id(p)), {})
            found[name] += [kept[state] for state in ("momentum_buffer", "exp_avg", "exp_avg_sq") if state in kept]
    return found


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and "embed" not in name


def plain(precision: str = "fp32", *, world_size: int = 1, accumulation: int = 1, steps: int = STEPS) -> Outcome:
    """The same in plain torch: fp32 masters that `torch.optim.Muon` and `torch.optim.AdamW` step."""
    model = deepcopy(first_model())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone() for name, p in named.items()}
    model.to(COMPUTE_DTYPES[precision])
    # Stacks are matrices of their own for torch's class.
    matrices = {
        (name, number): nn.Parameter(part)
        for name, m in masters.items()
        if is_matrix(name, m)
        for number, part in enumerate(m if m.dim() == 3 else [m])
    }
    others = {name: nn.Parameter(m) for name, m in masters.items() if not is_matrix(name, m)}
    of_matrices = torch.optim.Muon(
        matrices.values(), lr=OPTIONS["lr"], weight_decay=OPTIONS["weight_decay"], adjust_lr_fn="match_rms_adamw"
    )
    of_others = torch.optim.AdamW(
        others.values(), lr=OPTIONS["adamw_lr"], weight_decay=OPTIONS["weight_decay"], foreach=False
    )
    outcome: Outcome = {"loss": [], "norm": []}
    for micro_batches in batches(world_size, accumulation, steps):
        for name, p in named.items():
            p.data.copy_(round_half_away(masters[name]) if precision == "bf16" else masters[name])
            p.grad = None
        for ranks in micro_batches:
            for ids in ranks:
                loss = loss_of(model, ids)
                outcome["loss"].append(loss.item())
                (loss / accumulation / world_size).backward()
        grads = {name: p.grad.float() for name, p in named.items()}
        for (name, number), matrix in matrices.items():
            matrix.grad = grads[name][number] if masters[name].dim() == 3 else grads[name]
        for name, other in others.items():
            other.grad = grads[name]
        of_matrices.step()
        of_others.step()
    for name, p in model.named_parameters():
        outcome[name] = [masters.get(name, p.detach().float())]
    for (name, _), matrix in matrices.items():
        outcome[name].append(of_matrices.state[matrix]["momentum_buffer"])
    for name, other in others.items():
        outcome[name] += [of_others.state[other][state] for state in ("exp_avg", "exp_avg_sq")]
    for name, values in outcome.items():
        if name in masters and masters[name].dim() == 3:
            outcome[name] = [values[0], torch.stack(values[1:])]
    return outcome


def different(one: Outcome, other: Outcome, skip: Iterable[str] = ()) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert one.keys() == other.keys()

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return [
        name
        for name in one
        if name not in skip and not all(same(a, b) for a, b in zip(one[name], other[name], strict=True))
    ]


def furthest(one: Outcome, other: Outcome, skip: Iterable[str] = ("loss", "norm")) -> float:
    """The largest difference of an element, as a part of the largest element of its tensor."""
    found = 0.0
    for name in one.keys() - set(skip):
        for a, b in zip(one[name], other[name], strict=True):
            found = max(found, float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)))
    return found
