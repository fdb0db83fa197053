"""Rows of the parity table: what is computed, where it happens, and the same in plain torch.

A row is an `Arithmetic` (which numbers must come out) and a `Movement` (which must not change them). Plain torch knows
nothing of shards or tiers: it runs the ranks one after the other and adds their gradients.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.config import Tier
from penstock.rules.formats import COMPUTE_DTYPES
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.streams import inline

STEPS = 10
BATCH = 16
INPUTS, OUTPUTS = 12, 4
STATE_NAMES = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A root unit and two blocks of 5,312 parameters: several tiles each at 4 KiB, a shard border in a weight."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, OUTPUTS)
        self.blocks_used = blocks
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[: self.blocks_used]:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.last(x)


@dataclass(frozen=True)
class Arithmetic:
    """What is computed.

    Attributes:
        no_sync: all but the last micro-batch of a step are under `no_sync`, at a stage that honours it.
        groups: two param groups with their own learning rate and weight decay.
        schedule: a stock learning-rate scheduler.
    """

    precision: str = "fp32"
    master: str = "remainder"
    accumulation: int = 1
    clip: float | None = None
    reduce_dtype: torch.dtype | None = None
    accumulation_dtype: torch.dtype | None = None
    no_sync: bool = False
    reduce_op: str = "mean"
    optimizer: str = "AdamW"
    groups: bool = False
    schedule: bool = False

    @property
    def compute(self) -> torch.dtype:
        return COMPUTE_DTYPES[self.precision]

    @property
    def reduce(self) -> torch.dtype:
        return self.reduce_dtype or self.compute

    @property
    def accumulate(self) -> torch.dtype:
        return self.accumulation_dtype or self.reduce

    def make_optimizer(self, parameters: Sequence[Any], **kwargs: Any) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.optimizer)
        kwargs["lr"] = 1e-2
        if self.groups:
            half = len(parameters) // 2
            first = {"params": parameters[:half], "lr": 3e-3, "weight_decay": 0.0}
            return cls([first, {"params": parameters[half:], "weight_decay": 0.1}], **kwargs)
        return cls(parameters, weight_decay=0.05, **kwargs)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7) if self.schedule else None


#: A tier, or fractions of tiers as pairs.
Where = str | tuple[tuple[str, float], ...]


def shares(device: float = 0, cpu: float = 0, nvme: float = 0) -> Where:
    """Fractions of the tiers."""
    return tuple({"device": device, "cpu": cpu, "nvme": nvme}.items())


@dataclass(frozen=True)
class Movement:
    """Where it happens, and when.

    Attributes:
        disks: folders of the nvme tier.
    """

    stage: int = 3
    params: Where = "device"
    grads: Where = "device"
    optimizer: Where = "device"
    overlap: str = "auto"
    disks: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def but(self, stage: int | None = None, **options: Any) -> "Movement":
        """The same with another stage, and options."""
        merged = tuple({**dict(self.options), **options}.items())
        return replace(self, stage=self.stage if stage is None else stage, options=merged)

    @property
    def placement(self) -> penstock.Placement:
        kinds = {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}
        storages = {kind: where if isinstance(where, str) else dict(where) for kind, where in kinds.items()}
        placement = penstock.Placement(**storages)
        if any(Tier.NVME in placement.home(kind) for kind in storages):
            placement = replace(placement, nvme_path=disks(self.disks))
        return placement


PLACEMENTS = (
    Movement(),
    Movement(grads="cpu", optimizer="cpu"),
    Movement(params="cpu", grads="cpu", optimizer="cpu"),
)


CORE = tuple(
    Arithmetic(precision=precision, master=master, accumulation=accumulation, clip=clip)
    for precision, master in (("fp32", "remainder"), ("bf16", "fp32"), ("bf16", "remainder"))
    for accumulation in (1, 4)
    for clip in (None, 0.5)
)


def changed(value: Any) -> str:
    """A row's name: the fields that differ from their defaults."""
    plain = type(value)()
    names = [f"{k}={v}" for k, v in vars(value).items() if v != getattr(plain, k)]
    return " ".join(names) or "default"


Snapshot = dict[str, list[Tensor]]


@dataclass
class Trace:
    """What a run gave, on one rank.

    Attributes:
        losses: of every micro-batch of this rank.
        norms: gradient norm of every step.
        gradients: by step, the whole gradient after each micro-batch, where it is reduced by then.
        snapshots: parameters and optimizer states before each step, and at the end; only the end unless asked for.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[list[Tensor]]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def final(self) -> Snapshot:
        return self.snapshots[-1]


@cache
def batches(world_size: int, accumulation: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Inputs and targets by step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(11)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(BATCH, INPUTS, generator=generator), 2 * torch.randn(BATCH, OUTPUTS, generator=generator)

    return [[[batch() for _ in range(world_size)] for _ in range(accumulation)] for _ in range(STEPS)]


@cache
def first_model() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def make_model() -> Net:
    return deepcopy(first_model())


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    x, y = batch
    return ((model(x if dtype is None else x.to(dtype)) - y) ** 2).mean()


def round_half_away(value: Tensor) -> Tensor:
    """fp32 to bf16, ties away from zero: as every bf16 parameter is rounded, whatever its master."""
    return ((value.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def sum_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """(a + b) + (c + d): the order of shards within replicas, rounded to their dtype each time."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Plain:
    """The same training in plain torch: fp32 masters that the stock optimizer steps, ranks one after the other."""

    def __init__(self, what: Arithmetic, world_size: int) -> None:
        self.what = what
        self.holds_back = what.no_sync and world_size > 1
        self.world_size = world_size
        self.scale = 1 / world_size if what.reduce_op == "mean" else 1.0
        model = make_model()
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.model = model.to(what.compute)
        self.optimizer = what.make_optimizer(self.masters, foreach=False)
        self.scheduler = what.make_scheduler(self.optimizer)
        self.publish()

    def publish(self) -> None:
        half_away = self.what.precision == "bf16"
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            weight.data.copy_(round_half_away(master) if half_away else master)

    def load(self, snapshot: Snapshot, steps: int) -> None:
        """Continue from this state, after `steps` steps."""
        for index, master in enumerate(self.masters):
            master.copy_(snapshot["param"][index])
            if steps:
                moments = {name: snapshot[name][index].clone() for name in STATE_NAMES}
                self.optimizer.state[master] = {"step": torch.tensor(float(steps)), **moments}
        self.publish()

    def accumulate(self, step: int) -> tuple[list[list[Tensor]], list[float]]:
        """The gradient after each micro-batch that is reduced, and the losses of each rank in turn."""
        what = self.what
        after, losses = [], []
        sums: list[Tensor] | None = None
        held_back: list[list[Tensor] | None] = [None] * self.world_size  # by rank, under no_sync
        micro_batches = batches(self.world_size, what.accumulation)[step]
        for micro, ranks in enumerate(micro_batches):
            of_ranks = []
            for rank, batch in enumerate(ranks):
                self.model.zero_grad()
                loss = loss_of(self.model, batch, what.compute)
                loss.backward()
                losses.append(loss.item())
                mine = [w.grad for w in self.model.parameters()]
                if self.holds_back:
                    before = held_back[rank]
                    if before is not None:
                        mine = [b.float() + g.float() for b, g in zip(before, mine, strict=True)]
                    held_back[rank] = mine = [g.to(what.accumulate) for g in mine]
                of_ranks.append([g.to(what.reduce) for g in mine])
            if self.holds_back and micro < len(micro_batches) - 1:
                continue
            reduced = [sum_in_pairs(parts) for parts in zip(*of_ranks, strict=True)]
            if sums is None:
                sums = [r.to(what.accumulate) for r in reduced]
            else:
                sums = [(s.float() + r.float()).to(what.accumulate) for s, r in zip(sums, reduced, strict=True)]
            after.append([s.float() * self.scale for s in sums])
        return after, losses

    def step(self, gradient: list[Tensor]) -> float:
        """Clip and step. Returns the norm."""
        for master, g in zip(self.masters, gradient, strict=True):
            master.grad = g.clone()
        clip = self.what.clip if self.what.clip is not None else float("inf")
        norm = nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.publish()
        return norm.item()

    def snapshot(self) -> Snapshot:
        moments = {name: [self.optimizer.state[m][name].clone() for m in self.masters] for name in STATE_NAMES}
        return {"param": [m.clone() for m in self.masters], **moments}


def prepared(
    what: Arithmetic, how: Movement, streams: Streams | None = None, mesh: Any = None
) -> tuple[nn.Module, penstock.Optimizer]:
    model = make_model()
    optimizer = prepare_on(
        streams or inline(),
        model,
        what.make_optimizer(list(model.parameters())),
        stage=how.stage,
        placement=how.placement,
        precision=what.precision,
        master=what.master,
        max_grad_norm=what.clip,
        reduce_dtype=what.reduce_dtype,
        grad_accumulation_dtype=what.accumulation_dtype,
        mesh=mesh,
        overlap=how.overlap,
        options=penstock.Options(**{"reduce_op": what.reduce_op, **dict(how.options)}),
    )
    return model, optimizer


def train(
    what: Arithmetic,
    how: Movement,
    *,
    rank: int = 0,
    world_size: int = 1,
    streams: Streams | None = None,
    mesh: Any = None,
    steps: int = STEPS,
    look: bool = False,
) -> Trace:
    """The row on Penstock. `look` records gradients and states all the way; without it only the end is looked at."""
    model, optimizer = prepared(what, how, streams, mesh)
    scheduler = what.make_scheduler(optimizer)
    trace = Trace()
    parameters = list(model.parameters())
    device = streams.device if streams else torch.device("cpu")

    def snapshot() -> Snapshot:
        moments = {name: [optimizer.full_state(p, name) for p in parameters] for name in STATE_NAMES}
        return {"param": [optimizer.full_param(p) for p in parameters], **moments}

    for micro_batches in batches(world_size, what.accumulation)[:steps]:
        if look:
            trace.snapshots.append(snapshot())
            trace.gradients.append([])
        for micro, ranks in enumerate(micro_batches):
            last = micro == len(micro_batches) - 1
            with optimizer.no_sync() if what.no_sync and not last else nullcontext():
                x, y = ranks[rank]
                loss = loss_of(model, (x.to(device), y.to(device)))
                optimizer.backward(loss)
            trace.losses.append(loss.item())
            if look and (last or not what.no_sync or world_size == 1):
                trace.gradients[-1].append([optimizer.full_grad(p) for p in parameters])
        trace.norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    trace.snapshots.append(snapshot())
    optimizer.close()
    return trace
