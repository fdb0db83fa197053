"""The table of parity: one row for each choice of features, in which any two values meet, and any three risky ones.

A row is compared bit by bit with the row of the same arithmetic that keeps everything on the device and moves nothing,
and that one, where plain torch defines it, with plain torch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.engine.forward_backward import saved_tensors
from penstock.optim import Lion
from penstock.tiers.host import bounce_bytes
from tests.lib.covering import covering, named
from tests.lib.engines import prepare_on, same_bits
from tests.lib.memory import disks, pinning_on_cpu
from tests.lib.models import Blocks
from tests.lib.streams import inline, released, separate, simulated
from tests.parity import rows
from tests.parity.compare import against_plain_by_step
from tests.parity.rows import INPUTS, OUTPUTS, Arithmetic, Movement, batches, changed, loss_of

KIB = 1 << 10
STEPS = 3
SAVED_AFTER = 2  # steps
GROWS_BEFORE = 1  # a step
Row = Mapping[str, Any]
Seen = dict[str, Any]

RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1, lr_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "NAdam": torch.optim.NAdam,
    "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),
    "Lion": Lion,
}
PRECISIONS = {  # and masters
    "fp32": ("fp32", "remainder"),
    "bf16": ("bf16", "remainder"),
    "bf16, master": ("bf16", "fp32"),
    "bf16 alone": ("bf16", "none"),
    "fp16, dynamic": ("fp16", "fp32"),
}
WHERE: dict[str, Any] = {
    "device": "device",
    "cpu": "cpu",
    "nvme": "nvme",
    "thirds": {"device": 0.25, "cpu": 0.15, "nvme": 0.6},  # both cuts are in the first block
}
AHEAD: dict[str, dict[str, Any]] = {"far": {}, "not": {"prefetch_bytes": 0}, "little": {"live_bytes": 40 * KIB}}
FILES: dict[str, dict[str, Any]] = {
    "one folder": {},
    "three folders": {"checksums": False},
    "one request": {"io_queue_depth": 1, "update_threads": 3},
}
PINNED = {"all": None, "none": 0, "rings": bounce_bytes(4 * KIB) + 32 * KIB}  # bytes

# A feature and its values; of movement, the first ones are those of the device's row.

ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "precision": tuple(PRECISIONS),
    "rule": ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "Lion"),  # the others keep the same kinds of states
    "states": ("fp32", "bf16", "int8"),
    "clip": ("no", "prepare", "by hand"),
    "micro-batches": (1, 2),
    "no_sync": (False, True),
    "reduced in": (None, torch.float32, torch.bfloat16),
    "summed in": (None, torch.float32, torch.bfloat16),
    "reduce_op": ("mean", "sum"),
    "groups": (False, True),
    "persistent": (0, 512),  # other units, whose norm adds up in another order
    "grows": (False, True),
    "average": (False, True),
    "hands": ("no", "look", "set"),
}
MOVEMENT: dict[str, tuple[Any, ...]] = {
    "streams": (inline, separate, simulated, released),
    "params": tuple(WHERE),
    "grads": tuple(WHERE),
    "optimizer": tuple(WHERE),
    "overlap": ("none", "forward", "backward", "auto"),
    "moves": ("no", "between steps", "before step", "in forward", "in backward"),
    "stage": (3, 2, 1, 0),
    "tile": (4 << 20, 4 * KIB, 5 * KIB, 16 * KIB),
    "streamed": (0.0, 0.5, 1.0, "auto"),
    "ahead": tuple(AHEAD),
    "files": tuple(FILES),
    "pinned": tuple(PINNED),
    "activations": ("device", "cpu", "nvme"),
    "recomputes": (False, True),
    "average on": ("device", "cpu", "nvme"),
    "resumed": ("no", "blocking", "beside", "elsewhere", "state_dict"),
}
#: What plain torch defines, by fields of `Arithmetic`.
DEFINED: dict[str, tuple[Any, ...]] = {
    "precision": tuple(PRECISIONS[name] for name in ("fp32", "bf16", "bf16, master")),
    "accumulation": (1, 3),
    "clip": (None, 0.5),
    "reduce_dtype": (None, torch.float32, torch.bfloat16),
    "accumulation_dtype": (None, torch.float32, torch.bfloat16),
    "no_sync": (False, True),
    "reduce_op": ("mean", "sum"),
    "optimizer": ("AdamW", "Adam"),
    "groups": (False, True),
}
ARITHMETIC_AT_RISK = ("precision", "accumulation", "clip", "reduce_dtype", "accumulation_dtype")
FEATURES = ARITHMETIC | MOVEMENT
RISKY = ("streams", "params", "grads", "optimizer", "overlap", "moves", "clip")
PLAIN = {name: values[0] for name, values in FEATURES.items()}


def fits(row: Row) -> bool:
    """What a row, or a part of one, may have together."""
    row = PLAIN | row
    dynamic = row["precision"] == "fp16, dynamic"
    begins = row["overlap"] == "backward"  # then what has begun is neither scaled, undone, added to nor looked at
    if begins and (row["clip"] != "no" or dynamic or row["hands"] != "no"):
        return False
    if begins and row["micro-batches"] > 1 and not row["no_sync"]:
        return False
    if row["resumed"] == "state_dict" and (dynamic or row["average"]):
        return False  # which it does not have
    if row["states"] == "int8" and row["rule"] in ("RMSprop", "NAdam"):
        return False
    return not (row["ahead"] == "little" and row["persistent"])


@cache
def rows_of_one() -> list[dict[str, Any]]:
    """All pairs of all features, then all triples of the risky ones, of few kinds of arithmetic and on late streams."""
    pairs = covering(FEATURES, fits=fits, seed=5)
    few = {name: values[:1] for name, values in ARITHMETIC.items()}
    few |= {"precision": ("bf16",), "clip": ("no", "prepare"), "micro-batches": (2,), "no_sync": (True,)}
    few |= {"streams": (simulated, released), "overlap": ("none", "forward", "backward")}
    few |= {"moves": ("no", "between steps", "in backward"), "resumed": ("no",)}
    return covering({**FEATURES, **few}, risky=RISKY, fits=fits, first=pairs, seed=5)


@cache
def rows_of_two() -> list[dict[str, Any]]:
    """Ranks meet what they share: each rule and each form of a value is a matter of one rank."""
    fewer = {
        "rule": ("AdamW", "SGD"),
        "precision": ("fp32", "bf16", "bf16 alone", "fp16, dynamic"),
        "clip": ("no", "prepare"),
        "reduced in": (None, torch.float32),
        "summed in": (None, torch.float32),
        "streams": (separate, released),
        "params": ("device", "cpu", "thirds"),
        "grads": ("device", "cpu", "thirds"),
        "optimizer": ("device", "cpu", "nvme"),
        "overlap": ("none", "forward", "backward"),
        "moves": ("no", "between steps", "in backward"),
        "streamed": (0.0, 0.5),
        "tile": (4 * KIB, 4 << 20),
        "ahead": ("far", "little"),
        "files": ("one folder", "three folders"),
        "pinned": ("all", "rings"),
        "activations": ("device", "cpu"),
        "average on": ("device", "cpu"),
        "resumed": ("no", "beside", "elsewhere"),
    }
    return covering({**FEATURES, **fewer}, fits=fits, seed=6)


def at_home(row: Row, world_size: int = 1) -> dict[str, Any]:
    """The same arithmetic without movement. Whether ranks hold sums back is a matter of stages 0 and 1."""
    stage = 1 if row["no_sync"] and row["stage"] < 2 and world_size > 1 else 3
    return {**row, **{name: values[0] for name, values in MOVEMENT.items()}, "stage": stage}


def arithmetic(row: Row) -> Arithmetic:
    """A row's arithmetic as plain torch has it."""
    precision, master = PRECISIONS[row["precision"]]
    return Arithmetic(
        precision=precision,
        master=master,
        accumulation=row["micro-batches"],
        clip=0.5 if row["clip"] != "no" else None,
        reduce_dtype=row["reduced in"],
        accumulation_dtype=row["summed in"],
        no_sync=row["no_sync"] and row["stage"] < 2 and row["micro-batches"] > 1,  # else nothing is held back
        reduce_op=row["reduce_op"],
        optimizer=row["rule"],
        groups=row["groups"],
        schedule=row["groups"],
    )


# One row


@dataclass
class Training:
    """A row that is trained, on one rank."""

    row: Row
    rank: int = 0
    world_size: int = 1
    mesh: Any = None
    seen: Seen = field(default_factory=dict)

    def prepare(self, row: Row, *, grown: bool = False, shift: float = 0.0) -> None:
        """Make the engine of a row, with other first values where there is a shift."""
        self.model = model = Blocks(width=32, inputs=INPUTS, outputs=OUTPUTS)
        model.recomputes = False if row["recomputes"] else None  # without `use_reentrant`
        if shift:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(shift)
        model.first.requires_grad_(not row["grows"])  # which stays frozen
        model.blocks[1].requires_grad_(grown or not row["grows"])
        what = arithmetic(row)
        self.optimizer = prepare_on(
            row["streams"](most_seconds=0.0005) if row["streams"] in (simulated, released) else row["streams"](),
            model,
            stock(row, model, grown),
            mesh=self.mesh,
            stage=row["stage"],
            placement=placement(row),
            precision=what.precision,
            master=what.master,
            max_grad_norm=0.5 if row["clip"] == "prepare" else None,
            reduce_dtype=row["reduced in"],
            grad_accumulation_dtype=row["summed in"],
            overlap=row["overlap"],
            options=options(row),
        )
        self.scheduler = what.make_scheduler(self.optimizer)
        self.average = penstock.EMA(self.optimizer, 0.9, tier=row["average on"]) if row["average"] else None

    def run(self, folder: Path) -> Seen:
        self.prepare(self.row)
        resumed = self.row["resumed"]
        for step in range(STEPS):
            if step == SAVED_AFTER and resumed != "no":
                self.go_on_from(folder, resumed)
            if step == GROWS_BEFORE and self.row["grows"]:
                self.optimizer.reload_states()
                self.model.blocks[1].requires_grad_(True)
                self.optimizer.add_param_group({"params": list(self.model.blocks[1].parameters()), "lr": 2e-3})
            self.step(step)
        self.look_at_all()
        if self.average is not None:
            with self.average.applied():
                self.seen |= {f"average of {n}": self.optimizer.full_param(p) for n, p in self.model.named_parameters()}
                with torch.no_grad():
                    loss = loss_of(self.model, batches(1, 1)[0][0][0])
                    self.seen["loss of the average"] = loss.item()
        self.optimizer.close()
        self.seen |= {f"{name} left": p.detach().clone() for name, p in self.model.named_parameters()}
        return self.seen

    def go_on_from(self, folder: Path, how: str) -> None:
        """Save, and load into an engine of other values."""
        extra = {"scheduler": self.scheduler.state_dict()} if self.scheduler else None
        before = self.model, self.optimizer
        if how != "state_dict":
            self.optimizer.save(folder, extra=extra, blocking=how != "beside")
        if how == "beside":
            seen = dict(self.seen)
            self.step(SAVED_AFTER)
            self.seen = seen
        if how != "state_dict":
            self.optimizer.close()
        row = {**self.row, **ELSEWHERE} if how == "elsewhere" else self.row
        self.prepare(row, grown=row["grows"], shift=1.0)
        if how != "state_dict":
            extra = self.optimizer.load(folder) or extra
        else:
            self.optimizer.load_state_dict(before[1].state_dict())
            for mine, other in zip(self.model.parameters(), before[0].parameters(), strict=True):
                self.optimizer.set_full_param(mine, before[1].full_param(other))
            before[1].close()
        if self.scheduler:
            self.scheduler.load_state_dict(extra["scheduler"])

    def step(self, step: int) -> None:
        row, optimizer, seen = self.row, self.optimizer, self.seen
        micro_batches = batches(self.world_size, row["micro-batches"])[step]
        for micro, ranks in enumerate(micro_batches):
            last = micro == len(micro_batches) - 1
            if last:
                self.move_inside(step)
            with optimizer.no_sync() if row["no_sync"] and not last else nullcontext():
                loss = loss_of(self.model, ranks[self.rank])
                optimizer.backward(loss)
            seen[f"step {step}: loss {micro}"] = loss.item()
        if row["moves"] == "before step":
            optimizer.offload_states({"optimizer", "grad"}, ("nvme", "cpu")[step % 2], non_blocking=True)
        if row["hands"] == "look" and step == GROWS_BEFORE:
            self.look_at_each(f"step {step}")
        if row["hands"] == "set" and step == GROWS_BEFORE:
            self.set()
        if row["clip"] == "by hand":
            seen[f"step {step}: clipped"] = optimizer.clip_grad_norm_(0.5).item()
        result = optimizer.step()
        seen[f"step {step}: result"] = (result.grad_norm, result.skipped, result.loss_scale)
        optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        if self.average is not None:
            self.average.update()
        if row["moves"] == "between steps":
            optimizer.reload_states() if step % 2 else optimizer.offload_states(to="nvme" if step else "cpu")

    def move_inside(self, step: int) -> None:
        """Once, where the model passes: out in even steps, back in odd ones."""
        optimizer = self.optimizer

        def move(*_: Any) -> None:
            handle.remove()
            optimizer.reload_states(non_blocking=True) if step % 2 else optimizer.offload_states(
                to="nvme" if step else "cpu"
            )

        if self.row["moves"] == "in forward":
            handle = self.model.blocks[0].down.register_forward_pre_hook(move)
        elif self.row["moves"] == "in backward":
            handle = self.model.blocks[0].register_forward_hook(
                lambda _module, _inputs, made: made.register_hook(move) and None
            )

    def look_at_each(self, when: str) -> None:
        """Look at one tensor after the other."""
        for name, p in self.model.named_parameters():
            self.seen[f"{when}: {name}"] = self.optimizer.full_param(p)
            if p.requires_grad:
                self.seen[f"{when}: gradient of {name}"] = self.optimizer.full_grad(p)
                states = ("step", *self.optimizer._engine.access.state_names(p))
                self.seen |= {f"{when}: {state} of {name}": self.optimizer.full_state(p, state) for state in states}

    def look_at_all(self) -> None:
        self.seen |= {name: self.optimizer.full_param(p) for name, p in self.model.named_parameters()}
        for number, states in self.optimizer.state_dict()["state"].items():
            self.seen |= {f"{state} of parameter {number}": torch.as_tensor(value) for state, value in states.items()}

    def set(self) -> None:
        """All by hand: to values that bf16 holds in full, and some by a `gathered` of the first rank's."""
        optimizer = self.optimizer
        for number, p in enumerate(self.model.parameters()):
            value = torch.linspace(-1, 1, p.numel()).view(p.shape).bfloat16().float()
            optimizer.set_full_param(p, value)
            if not p.requires_grad:
                continue
            optimizer.set_full_grad(p, value + number)
            for state in ("step", *optimizer._engine.access.state_names(p)):
                is_number = state in ("step", "mu_product")
                optimizer.set_full_state(p, state, torch.tensor(7.0) if is_number else value.square())
        assert torch.equal(optimizer.full_param(p), value)
        with optimizer.gathered(modify=True), torch.no_grad():
            for p in self.model.parameters():
                p.view(-1)[::2].mul_(0.5 if self.rank == 0 else 3.0)


#: Where a row goes on that is resumed elsewhere.
ELSEWHERE = {
    "streams": separate,
    "params": "cpu",
    "grads": "thirds",
    "optimizer": "thirds",
    "tile": 5 * KIB,
}


def stock(row: Row, model: nn.Module, grown: bool) -> torch.optim.Optimizer:
    """Two groups, or one, and one more for what comes later."""
    later = list(model.blocks[1].parameters()) if row["grows"] else []
    first = [p for p in model.parameters() if p.requires_grad and all(p is not other for other in later)]
    make = RULES[row["rule"]]
    half = len(first) // 2 if row["groups"] else 0
    groups = [{"params": first[:half], "lr": 3e-3, "weight_decay": 0.0}] if half else []
    optimizer = make([*groups, {"params": first[half:]}], lr=1e-2, weight_decay=0.05)
    if grown:
        optimizer.add_param_group({"params": later})
    return optimizer


def placement(row: Row) -> penstock.Placement:
    return penstock.Placement(
        **{kind: WHERE[row[kind]] for kind in ("params", "grads", "optimizer")},
        activations=row["activations"],
        nvme_path=disks(3 if row["files"] == "three folders" else 1),
    )


def options(row: Row) -> penstock.Options:
    scaled = {}
    if row["precision"].startswith("fp16"):
        dynamic = row["precision"] == "fp16, dynamic"
        scaled = {"initial_loss_scale": 2.0**17 if dynamic else 2.0**8, "dynamic_loss_scale": dynamic}
    return penstock.Options(
        tile_bytes=row["tile"],
        persistent_bytes=row["persistent"],
        streamed_updates=row["streamed"],
        state_dtype=row["states"],
        rounding_seed=9,
        reduce_op=row["reduce_op"],
        **{**scaled, **AHEAD[row["ahead"]], **FILES[row["files"]]},
    )


# What is compared


@contextmanager
def around(row: Row) -> Iterator[None]:
    """Small tensors that forward saves count, and memory is pinned as far as the row says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "LEAST_BYTES", 512)
        if (limit := PINNED[row["pinned"]]) is not None:
            pinning_on_cpu(patch, limit)
        yield


def train(row: Row, rank: int = 0, world_size: int = 1, mesh: Any = None, folder: Path | None = None) -> Seen:
    """Everything that is seen of a row; in the folder, which ranks share, it is saved."""
    with TemporaryDirectory() as own, around(row):
        return Training(row, rank, world_size, mesh).run(folder or Path(own, "saved"))


def seen_at_home(row: Row, rank: int = 0, world_size: int = 1, mesh: Any = None) -> Seen:
    """Everything that is seen of a row which moves nothing; rows that have their arithmetic in common share it."""
    return _seen_at_home(tuple(row.items()), rank, world_size, mesh)


@lru_cache(maxsize=256)
def _seen_at_home(row: tuple[tuple[str, Any], ...], rank: int, world_size: int, mesh: Any) -> Seen:
    return train(dict(row), rank, world_size, mesh)


def different(row: Row, rank: int = 0, world_size: int = 1, mesh: Any = None, folder: Path | None = None) -> list[str]:
    """What a row has otherwise than the device's row: names of the first values."""
    home = seen_at_home(at_home(row, world_size), rank, world_size, mesh)
    found = train(row, rank, world_size, mesh, folder)
    assert found.keys() == home.keys()
    names = [name for name in found if not same(found[name], home[name])]
    return [f"{named(row, PLAIN)}: {', '.join(names[:4])}, {len(names)} in all"] if names else []


def same(one: Any, other: Any) -> bool:
    return same_bits(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)  # NaN is itself


def otherwise_on_rank(
    rank: int,
    rows: Sequence[Row],
    world_size: int,
    folder: Path,
    shape: tuple[int, int] | None,
    what: Arithmetic | None = None,
) -> list[str]:
    """What rows have otherwise than the device's row, and an arithmetic otherwise than plain torch, on a mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    found = [] if what is None else otherwise_than_plain(what, 3, rank, world_size, mesh)
    for number, row in enumerate(rows):
        found += different(row, rank, world_size, mesh, folder / str(number))
    return found


# Plain torch


def arithmetics(risky: Collection[str] = ARITHMETIC_AT_RISK) -> list[Arithmetic]:
    """What plain torch defines bit by bit, or to the last one: all pairs, and triples of the risky features."""

    def fits(row: Row) -> bool:
        if row.get("optimizer") == "Adam" and row.get("clip"):
            return False  # whose decay cancels gradients that are clipped by a norm which is a few ulp off
        return not (row.get("no_sync") and row.get("accumulation") == 1)

    found = []
    for row in covering(DEFINED, risky=risky, fits=fits, seed=5):
        precision, master = row.pop("precision")
        found.append(Arithmetic(precision=precision, master=master, schedule=row["groups"], **row))
    return found


def otherwise_than_plain(
    what: Arithmetic, stage: int, rank: int = 0, world_size: int = 1, mesh: Any = None
) -> list[str]:
    steps = STEPS if world_size == 1 else 2
    trace = rows.train(what, Movement(stage), look=True, rank=rank, world_size=world_size, mesh=mesh, steps=steps)
    return [f"{changed(what)}: {message}" for message in against_plain_by_step(what, trace, rank, world_size)]


def otherwise_than_plain_on_rank(rank: int, whats: Sequence[Arithmetic]) -> list[str]:
    stages = [1 if what.no_sync else 3 - number % 2 for number, what in enumerate(whats)]
    found = []
    for what, stage in zip(whats, stages, strict=True):
        found += otherwise_than_plain(what, stage, rank, 2)
    return found
