"""Rows of the table of resumed runs: what is trained, saved, and gone on with."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.streams import inline
from tests.parity.rows import BATCH, INPUTS, OUTPUTS, Arithmetic, Movement, Net, batches, changed, loss_of

SAVED_AT = 2
GOES_ON = 3
SMALL = {"tile_bytes": 4 << 10}


class Other(nn.Module):
    """What a model has beside trained parameters: dropout, batch norms, tied and frozen ones, buffers of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.down.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(32, OUTPUTS)
        self.unused = nn.Linear(3, 3)  # gets no gradient: has no state
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = nn.functional.dropout(self.norm(self.first(x)), 0.2, training=self.training)
        x = x + self.frozen(torch.relu(x))
        return self.last(self.scale * self.down(torch.tanh(self.up(x))))


@dataclass(frozen=True)
class Run:
    """One engine.

    Attributes:
        offloaded: kinds, and to where, when it saves, and right after it was loaded.
        mesh: its shape, where it is not the default group.
    """

    what: Arithmetic = field(default_factory=Arithmetic)
    how: Movement = field(default_factory=lambda: Movement().but(**SMALL))
    streams: Callable[[], Streams] = inline
    model: Callable[[], nn.Module] = Net
    rule: Any = None
    offloaded: tuple[tuple[str, ...], str] | None = None
    mesh: tuple[int, ...] | None = None

    def __str__(self) -> str:
        rest = [f"{k}={getattr(self, k)}" for k in ("rule", "offloaded", "mesh") if getattr(self, k)]
        name = f"{self.model.__name__} {changed(self.what)} {self.streams.__name__} {changed(self.how)}"
        return " ".join([name, *rest])

    def prepare(self, seed: int = 5) -> tuple[nn.Module, penstock.Optimizer, Any]:
        """A model, its optimizer and its scheduler, of first values that the seed says."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model()
        trained = [p for p in model.parameters() if p.requires_grad]
        what = self.what
        given = what.make_optimizer(trained) if self.rule is None else self.rule(trained)
        optimizer = prepare_on(
            self.streams(),
            model,
            given,
            stage=self.how.stage,
            placement=self.how.placement,
            precision=what.precision,
            master=what.master,
            max_grad_norm=what.clip,
            reduce_dtype=what.reduce_dtype,
            grad_accumulation_dtype=what.accumulation_dtype,
            mesh=init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard")) if self.mesh else None,
            overlap=self.how.overlap,
            options=penstock.Options(**{"reduce_op": what.reduce_op, **dict(self.how.options)}),
        )
        return model, optimizer, what.make_scheduler(optimizer)

    def offload(self, optimizer: penstock.Optimizer) -> None:
        if self.offloaded is not None:
            kinds, to = self.offloaded
            optimizer.offload_states(kinds, to, pin_memory=False)


Values = dict[str, Tensor]


@dataclass
class Seen:
    """What a run gave after the save, or the load: at once, in each step, and in the end."""

    at_once: Values
    losses: list[float] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)  # and loss scales; of a step that was skipped, NaN
    final: Values = field(default_factory=dict)

    def otherwise(self, other: "Seen", but: str = "nothing") -> list[str]:
        """What it has otherwise than another, apart from what has a word in its name."""
        found = [f"{name} at once" for name in different(self.at_once, other.at_once)]
        found += [name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)]
        found += [f"{name} in the end" for name in different(self.final, other.final)]
        return [name for name in found if but not in name]


def different(ours: Values, theirs: Values) -> list[str]:
    """Names of what has other bits."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def values(model: nn.Module, optimizer: penstock.Optimizer) -> Values:
    """Parameters, states, step counts, buffers and options."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: Values = {}
    names = optimizer._engine.access.state_names
    for name, parameter in model.named_parameters():
        found[name] = optimizer.full_param(parameter)
        if id(parameter) in trained:
            found |= {f"{name} {s}": optimizer.full_state(parameter, s) for s in ("step", *names(parameter))}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers() if name != "scratch"}
    for number, group in enumerate(optimizer.param_groups):
        numbers = {k: v for k, v in group.items() if isinstance(v, int | float)}
        found |= {f"group {number} {k}": torch.tensor(float(v)) for k, v in numbers.items()}
    return found


def iterate(
    run: Run, model: nn.Module, optimizer: penstock.Optimizer, scheduler: Any, step: int, rank: int, world_size: int
) -> tuple[list[float], str]:
    """One step: the losses of its micro-batches, and the norm with the loss scale."""
    micro_batches = batches(world_size, run.what.accumulation)[step]
    losses = []
    for micro, ranks in enumerate(micro_batches):
        last = micro == len(micro_batches) - 1
        with optimizer.no_sync() if run.what.no_sync and not last else nullcontext():
            loss = loss_of(model, ranks[rank])
            optimizer.backward(loss)
        losses.append(loss.item())
    result = optimizer.step()
    optimizer.zero_grad()
    if scheduler:
        scheduler.step()
    return losses, f"{result.grad_norm} at {result.loss_scale}"


def go_on(
    run: Run,
    model: nn.Module,
    optimizer: penstock.Optimizer,
    scheduler: Any,
    rank: int = 0,
    world_size: int = 1,
    steps: int = GOES_ON,
) -> Seen:
    """What comes after the save."""
    seen = Seen(values(model, optimizer))
    for step in range(SAVED_AT, SAVED_AT + steps):
        losses, norm = iterate(run, model, optimizer, scheduler, step, rank, world_size)
        seen.losses += losses
        seen.norms.append(norm)
    seen.final = values(model, optimizer)
    return seen


def seed_everything(seed: int) -> None:
    """What dropout draws from."""
    torch.manual_seed(seed)
    random.seed(seed)


def saved(
    run: Run, folder: Path, rank: int = 0, world_size: int = 1, *, blocking: bool = True, steps: int = GOES_ON
) -> Seen:
    """Train, save, go on."""
    seed_everything(rank)
    model, optimizer, scheduler = run.prepare()
    for step in range(SAVED_AT):
        iterate(run, model, optimizer, scheduler, step, rank, world_size)
    run.offload(optimizer)
    extra = {"scheduler": scheduler.state_dict()} if scheduler else None
    optimizer.save(folder, extra=extra, blocking=blocking)
    seen = go_on(run, model, optimizer, scheduler, rank, world_size, steps)
    optimizer.close()
    return seen


def resumed(run: Run, folder: Path, rank: int = 0, world_size: int = 1, *, steps: int = GOES_ON) -> Seen:
    """Load into an engine of other values, and go on."""
    seed_everything(100 + rank)
    model, optimizer, scheduler = run.prepare(seed=77)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(3)
    torch.rand(BATCH)
    run.offload(optimizer)
    extra = optimizer.load(folder)
    if scheduler:
        scheduler.load_state_dict(extra["scheduler"])
    seen = go_on(run, model, optimizer, scheduler, rank, world_size, steps)
    optimizer.close()
    return seen
