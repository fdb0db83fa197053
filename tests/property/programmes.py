"""Random programmes of a training loop: drawn by a seed, run on Penstock and on plain torch side by side.

An operation runs on both, Penstock first. It gives the same values, or the same error of torch, or Penstock refuses it
by name and it has no effect; an interrupted one has its whole effect or none, or the optimizer says by name that its
state is in parts. A loop that met an error goes on with `zero_grad`.
"""

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.interrupts import interrupt
from tests.lib.memory import disks
from tests.lib.models import WIDTH, Blocks
from tests.lib.streams import inline, late, released, separate

BLOCKS = 3
KINDS = ("param", "grad", "master", "optimizer")
Operation = tuple[Any, ...]


class OutOfOrderError(Exception):
    pass


# The loop


class Block(nn.Module):
    """Matrices, a norm, a parameter that is used element by element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.linear(x))) * self.scale


def make_net(checkpointed: bool) -> Blocks:
    """Blocks between two ends with one weight."""
    recomputes = False if checkpointed else None
    model = Blocks(BLOCKS, inputs=WIDTH, outputs=WIDTH, make=Block, recomputes=recomputes, seed=1)
    model.last.weight = model.first.weight
    return model


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The large eps keeps Adam from blowing up a last bit where a gradient is near zero."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, foreach=False)


class Side:
    """A model, an optimizer, and the graphs that wait for their backward."""

    def __init__(self, model: Blocks, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.graphs: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def take(self, number: int, *, keep: bool) -> Tensor:
        number %= len(self.graphs)
        return self.graphs[number] if keep else self.graphs.pop(number)

    def run(self, part: int | None, x: Tensor) -> Tensor:
        return (self.model if part is None else self.model.blocks[part])(x)

    def forward(self, seed: int, mode: str, part: int | None, inside: tuple[Any, ...]) -> list[Tensor]:
        modes = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        with self.hooked(inside), modes[mode]():
            output = self.run(part, noise(seed, 3, WIDTH))
            loss = output.square().mean()
        if mode == "grad":
            self.graphs.append(loss)
        return [loss.detach()]

    @contextmanager
    def hooked(self, inside: tuple[Any, ...]) -> Iterator[None]:
        """With hooks of a user's in a block: before it, after it, and at the gradient of what it made."""
        handles = []
        for place, number, what in inside:
            linear = self.model.blocks[number].linear

            def hook(module: nn.Module, args: Any, output: Any = None, place: str = place, what: Any = what) -> None:
                if place != "gradient":
                    self.act(*what)
                elif output.requires_grad:
                    output.register_hook(lambda grad: self.act(*what))

            handles.append(
                linear.register_forward_pre_hook(hook) if place == "before" else linear.register_forward_hook(hook)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def act(self, what: str, *arguments: Any) -> None:
        if what == "fail":
            raise OutOfOrderError

    def penalty(self, seed: int, wanted: str, part: int | None) -> list[Tensor]:
        """A recorded backward, whose own comes later."""
        x = noise(seed, 3, WIDTH).requires_grad_()
        output = self.run(part, x).square().mean()
        wrt = [x] if wanted == "input" else list((self.model if part is None else self.model.blocks[part]).parameters())
        gradients = torch.autograd.grad(output, wrt, create_graph=True)
        self.graphs.append(sum((g.square().sum() for g in gradients), torch.zeros(())))
        return [g.detach().clone() for g in gradients]

    def backward(self, number: int, how: str, retain: bool, keep: bool) -> list[Tensor]:
        loss = self.take(number, keep=retain or keep)
        if how == "inputs":
            loss.backward(retain_graph=retain, inputs=self.parameters[::2])
        elif how == "loss":
            loss.backward(retain_graph=retain)
        else:
            self.backward_of(loss, retain)
        return self.gradients()

    def backward_of(self, loss: Tensor, retain: bool) -> None:
        loss.backward(retain_graph=retain)

    def differentiate(self, number: int, retain: bool) -> list[Tensor]:
        loss = self.take(number, keep=retain)
        found = torch.autograd.grad(loss, self.parameters, retain_graph=retain, allow_unused=True)
        return [torch.zeros(()) if g is None else g.clone() for g in found]

    def combine(self, one: int, other: int) -> list[Tensor]:
        self.graphs.append(self.take(one, keep=True) + 2 * self.take(other, keep=True))
        return [self.graphs[-1].detach()]

    def drop(self, number: int) -> list[Tensor]:
        self.take(number, keep=False)
        return []

    def within(self, modify: bool, operation: Operation) -> list[Tensor]:
        with self.gathered(modify):
            return self.do(operation)

    def read(self) -> list[Tensor]:
        with self.gathered(False):
            return [p.detach().clone() for p in self.parameters]

    def begin(self, number: int) -> list[Tensor]:
        """A graph that begins inside of `gathered`, and ends outside."""
        with self.gathered(False):
            p = self.parameters[number]
            self.graphs.append((p.view(-1) * 2).tanh().sum() + p.square().sum())
        return [self.graphs[-1].detach()]

    def write(self, number: int, seed: int, fails: bool) -> list[Tensor]:
        if fails and type(self) is Side:
            raise OutOfOrderError
        with self.gathered(True), torch.no_grad():
            p = self.parameters[number]
            p[:1] += noise(seed, *p[:1].shape)
            if fails:
                raise OutOfOrderError
        return []

    def gathered(self, modify: bool) -> Any:
        return nullcontext()

    def look(self) -> list[Tensor]:
        return self.values() + self.gradients()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def gradients(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    def states(self) -> list[Tensor]:
        name = "momentum_buffer" if isinstance(self.optimizer, torch.optim.SGD) else "exp_avg"
        return [self.optimizer.state[p].get(name, torch.zeros_like(p)).clone() for p in self.parameters]

    def set(self, number: int, seed: int) -> list[Tensor]:
        p = self.parameters[number]
        with torch.no_grad():
            p.copy_(noise(seed, *p.shape))
        return []

    def move(self, *what: Any) -> list[Tensor]:
        return []

    def save(self, path: Path, blocking: bool) -> list[Tensor]:
        del blocking
        SAVED[path] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        return []

    def load(self, path: Path) -> list[Tensor]:
        model, optimizer = copy.deepcopy(SAVED[path])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.zero_grad()
        return []

    def step(self) -> list[Tensor]:
        self.optimizer.step()
        return []

    def zero_grad(self) -> list[Tensor]:
        self.optimizer.zero_grad()
        return []

    def do(self, operation: Operation) -> list[Tensor]:
        name, *arguments = operation
        return getattr(self, name)(*arguments)  # type: ignore[no-any-return]

    def copied(self) -> "Side":
        """Of plain torch: the same state, for an operation that may have happened."""
        model = copy.deepcopy(self.model)
        for p, other in zip(self.parameters, model.parameters(), strict=True):
            other.grad = None if p.grad is None else p.grad.clone()
        optimizer = make_optimizer(type(self.optimizer).__name__, model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return Side(model, optimizer)


SAVED: dict[Path, Any] = {}  # of plain torch: what Penstock has in files


class Ours(Side):
    optimizer: penstock.Optimizer

    def __init__(self, model: Blocks, optimizer: penstock.Optimizer, state: str) -> None:
        super().__init__(model, optimizer)
        self.state = state

    def act(self, what: str, *arguments: Any) -> None:
        if what == "fail":
            raise OutOfOrderError
        if what == "locations":
            assert str(self.optimizer.locations())
        elif what == "look":
            self.optimizer.full_param(self.parameters[arguments[0]])
            self.optimizer.full_grad(self.parameters[arguments[0]])
        else:
            self.move(what, *arguments)

    def backward_of(self, loss: Tensor, retain: bool) -> None:
        self.optimizer.backward(loss, retain_graph=retain)

    def gathered(self, modify: bool) -> Any:
        return self.optimizer.gathered(modify=modify)

    def values(self) -> list[Tensor]:
        return [self.optimizer.full_param(p) for p in self.parameters]

    def gradients(self) -> list[Tensor]:
        return [self.optimizer.full_grad(p) for p in self.parameters]

    def states(self) -> list[Tensor]:
        return [self.optimizer.full_state(p, self.state) for p in self.parameters]

    def set(self, number: int, seed: int) -> list[Tensor]:
        p = self.parameters[number]
        self.optimizer.set_full_param(p, noise(seed, *p.shape))
        return []

    def move(self, *what: Any) -> list[Tensor]:
        name, *arguments = what
        if name == "offload":
            kinds, to, non_blocking = arguments
            self.optimizer.offload_states(kinds, to, non_blocking=non_blocking)
        elif name == "reload":
            self.optimizer.reload_states(non_blocking=arguments[0])
        else:
            self.optimizer.synchronize()
        return []

    def save(self, path: Path, blocking: bool) -> list[Tensor]:
        self.optimizer.save(path, blocking=blocking)
        return []

    def load(self, path: Path) -> list[Tensor]:
        self.optimizer.load(path)
        return []


# Programmes


@dataclass(frozen=True)
class Setting:
    """What a programme runs on."""

    streams: str
    storages: dict[str, str]
    overlap: str
    optimizer: str
    checkpointed: bool
    tile_bytes: int

    def make(self) -> tuple[Ours, Side]:
        model = make_net(self.checkpointed)
        plain = copy.deepcopy(model)
        optimizer = prepare_on(
            STREAMS[self.streams](),
            model,
            make_optimizer(self.optimizer, model),
            placement=penstock.Placement(**self.storages, nvme_path=disks(1)),  # type: ignore[arg-type]
            precision="fp32",
            overlap=self.overlap,
            options=penstock.Options(tile_bytes=self.tile_bytes),
        )
        state = "momentum_buffer" if self.optimizer == "SGD" else "exp_avg"
        return Ours(model, optimizer, state), Side(plain, make_optimizer(self.optimizer, plain))


STREAMS: dict[str, Callable[[], Streams]] = {
    "inline": inline,
    "separate": separate,
    "late": late,
    "late and released": partial(released, most_seconds=0.0003),
}


def draw_setting(chance: random.Random) -> Setting:
    return Setting(
        streams=chance.choice([*STREAMS, "separate", "late and released"]),
        storages={kind: chance.choice(["device", "cpu", "cpu", "nvme"]) for kind in ("params", "grads", "optimizer")},
        overlap=chance.choice(["none", "forward"]),
        optimizer=chance.choice(["SGD", "AdamW"]),
        checkpointed=chance.random() < 0.2,
        tile_bytes=chance.choice([4096, 1 << 22]),
    )


def draw_move(chance: random.Random) -> Operation:
    if chance.random() < 0.5:
        kinds = chance.choice([None, tuple(chance.sample(KINDS, chance.randint(1, 4)))])
        return "offload", kinds, chance.choice(["cpu", "nvme"]), chance.random() < 0.5
    return ("reload", chance.random() < 0.5) if chance.random() < 0.7 else ("settle",)


def draw_hook(chance: random.Random) -> tuple[Any, ...]:
    place = chance.choice(["before", "after", "gradient"])
    kind = chance.choice(["locations", "look", "move", "move", "fail"])
    what: Operation = (kind,)
    if kind == "look":
        what = "look", chance.randrange(5)
    elif kind == "move":
        what = draw_move(chance)
    return place, chance.randrange(BLOCKS), what


def draw_graph(chance: random.Random) -> Operation:
    """What makes a graph, or looks at the model."""
    part = chance.choice([None, None, None, 0, 2])
    kind = chance.choice(["forward"] * 4 + ["penalty", "penalty", "begin"])
    if kind == "forward":
        mode = chance.choice(["grad", "grad", "grad", "grad", "no_grad", "inference"])
        inside = tuple(draw_hook(chance) for _ in range(chance.choice([0, 0, 0, 1, 2])))
        return "forward", chance.randrange(99), mode, part, inside
    if kind == "penalty":
        return "penalty", chance.randrange(99), chance.choice(["input", "params"]), part
    return "begin", chance.randrange(5)


def draw_use(chance: random.Random) -> Operation:
    """What uses a graph."""
    number = chance.randrange(9)
    kind = chance.choice(["backward"] * 6 + ["differentiate", "combine", "drop"])
    if kind == "backward":
        how = chance.choice(["optimizer", "optimizer", "optimizer", "loss", "inputs"])
        return "backward", number, how, chance.random() < 0.25, chance.random() < 0.05
    if kind == "differentiate":
        return "differentiate", number, chance.random() < 0.3
    return ("combine", number, chance.randrange(9)) if kind == "combine" else ("drop", number)


def draw_other(chance: random.Random) -> Operation:
    kind = chance.choice(["read", "write", "look", "set", "move", "move", "save", "load", "within"])
    if kind == "write":
        return "write", chance.randrange(5), chance.randrange(99), chance.random() < 0.2
    if kind == "set":
        return "set", chance.randrange(5), chance.randrange(99)
    if kind == "move":
        return "move", *draw_move(chance)
    if kind == "save":
        return "save", chance.randrange(3), chance.random() < 0.6
    if kind == "load":
        return "load", chance.randrange(3)
    if kind == "within":
        return "within", chance.random() < 0.3, chance.choice([draw_graph, draw_use])(chance)
    return (kind,)


def draw_programme(seed: int) -> tuple[Setting, list[Operation]]:
    chance = random.Random(seed)
    setting = draw_setting(chance)
    programme: list[Operation] = []
    for _ in range(chance.randint(3, 16)):
        draw = chance.choice([draw_graph, draw_graph, draw_use, draw_use, draw_other, None])
        operation = draw(chance) if draw else chance.choice([("step",), ("step",), ("zero_grad",)])
        if chance.random() < 0.1:
            operation = "interrupted", round(10 ** chance.uniform(0, 3.3)), operation
        programme.append(operation)
    return setting, programme


# Running them


@dataclass
class Run:
    """One programme on both sides."""

    setting: Setting
    folder: Path
    said: list[str] = field(default_factory=list)  # what was refused by name, and what was interrupted
    saved: dict[int, Path] = field(default_factory=dict)
    torn: bool = False

    def __post_init__(self) -> None:
        self.ours, self.plain = self.setting.make()

    def do(self, operation: Operation) -> None:
        lines = 0
        if operation[0] == "interrupted":
            _, lines, operation = operation
        uses = operation[2] if operation[0] == "within" else operation
        if uses[0] in ("backward", "differentiate", "combine", "drop") and not self.ours.graphs:
            return
        if operation[0] == "save":
            operation = "save", Path(self.folder, f"{operation[1]}-{len(self.said)}-{len(SAVED)}"), operation[2]
        elif operation[0] == "load":
            if not self.saved:
                return
            operation = "load", list(self.saved.values())[operation[1] % len(self.saved)]
        self.run(operation, uses[0], lines)
        if operation[0] == "save" and operation[1] in SAVED:
            self.saved[len(self.saved)] = operation[1]

    def run(self, operation: Operation, name: str, lines: int) -> None:
        graphs = list(self.ours.graphs), list(self.plain.graphs)
        values: list[Tensor] = []
        error: BaseException | None = None
        with interrupt(lines, also=MODELS) as happened:
            try:
                values = self.ours.do(operation)
            except (Exception, KeyboardInterrupt) as found:
                error = found.with_traceback(None)
        if isinstance(error, KeyboardInterrupt):
            self.said.append(f"{name} interrupted at {happened.where}")
            self.ours.graphs, self.plain.graphs = graphs
            self.after_interrupt(operation, name)
            return
        assert torch.is_grad_enabled()
        if isinstance(error, penstock.PenstockError):
            self.said.append(f"{name}: {type(error).__name__}: {error}")
            self.ours.graphs, self.plain.graphs = graphs
            self.forget(name)
            return
        if error is not None:
            with pytest.raises(type(error)):
                self.plain.do(operation)
            self.said.append(f"{name}: {type(error).__name__}: {error}")
            self.ours.graphs, self.plain.graphs = graphs
            self.forget(name)
            return
        expected = self.plain.do(operation)
        assert_equal(values, expected, name)
        if name == "step":
            self.adopt()

    def forget(self, name: str) -> None:
        """What a loop does after a backward that failed, whose graph is of no more use."""
        if name in ("backward", "differentiate", "penalty", "forward"):
            for side in (self.ours, self.plain):
                side.zero_grad()
            if name != "forward":
                self.clear()

    def clear(self) -> None:
        for side in (self.ours, self.plain):
            side.graphs = []

    def after_interrupt(self, operation: Operation, name: str) -> None:
        """Nothing happened, or everything; or the state is in parts, and named."""
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        try:
            self.ours.zero_grad()
            values, states = self.ours.values(), self.ours.states()
        except penstock.EngineError as error:
            if name not in ("step", "load", "set", "write", "move") and operation[0] != "within":
                raise
            self.said.append(f"torn: {error}")
            self.torn = True
            return
        if name in ("step", "load", "set", "write"):
            after = self.plain.copied()
            with suppress(OutOfOrderError):
                after.do(operation)
            before = close(values, self.plain.values()) and close(states, self.plain.states())
            whole = close(values, after.values()) and close(states, after.states())
            assert before or whole, f"{name} happened in parts"
            if not before:
                self.plain.do(operation)
                self.adopt()
            self.clear()
        else:
            assert_equal(values, self.plain.values(), name)
        if name in ("backward", "differentiate", "combine", "drop"):
            self.clear()
        self.plain.zero_grad()
        if name == "save":
            self.ours.optimizer.synchronize()

    def adopt(self) -> None:
        """After an update, whose arithmetic is that of torch but for its last bits: go on from the same values."""
        for p, value in zip(self.plain.parameters, self.ours.values(), strict=True):
            torch.testing.assert_close(value, p.detach(), rtol=1e-6, atol=1e-6)
            p.data.copy_(value)

    def finish(self) -> None:
        optimizer = self.ours.optimizer
        if self.torn:
            for call in (optimizer.step, lambda: optimizer.save(self.folder / "torn"), optimizer.close):
                with pytest.raises(penstock.EngineError):
                    call()
            optimizer.close(keep_params=False)
            return
        self.clear()
        for operation in [
            ("zero_grad",),
            ("forward", 1, "grad", None, ()),
            ("backward", 0, "optimizer", False, False),
            ("step",),
            ("look",),
        ]:
            said = len(self.said)
            self.do(operation)
            assert not self.said[said:], "the loop does not go on"
        values = self.ours.values()
        optimizer.close()
        assert_equal([p.detach() for p in self.ours.parameters], values, "close")


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(one, other, strict=True))


def assert_equal(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: number {number} differs by {(a - b).abs().max()}"


MODELS = (Blocks.forward.__code__, Block.forward.__code__)


def run_programme(setting: Setting, programme: list[Operation]) -> list[str]:
    """Returns: what was said on the way."""
    with tempfile.TemporaryDirectory() as folder:
        SAVED.clear()
        run = Run(setting, Path(folder))
        try:
            for operation in programme:
                run.do(operation)
                if run.torn:
                    break
            run.finish()
        except BaseException as error:
            error.add_note(f"{setting}\n" + "\n".join(map(str, [*programme, *run.said])))
            run.ours.optimizer.close(keep_params=False)
            raise
    return run.said
