"""Random sequences of what a user can do, on Penstock at once, on Penstock late, and in plain torch: one trajectory."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.lib.engines import prepare_on
from tests.lib.fuzz import examples
from tests.lib.memory import disks
from tests.lib.streams import inline, separate, simulated

WIDTH, INPUTS = 24, 6
CLIP = 1.0
Log = list[Tensor]


class OutOfOrderError(Exception):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise OutOfOrderError
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Two blocks, the second of which may be left out; a weight that is used on both ends, and one that may not be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(300))
        self.blocks_used = 2
        self.shifts = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.shifts:
            x = x + self.shift[::100].sum()
        for block in self.blocks[: self.blocks_used]:
            x = block(x)
        return x @ self.embed.weight


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The large eps keeps Adam from blowing up a last bit where a gradient is near zero."""
    first, *rest = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": rest, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, foreach=False)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Subject:
    """What both kinds share: a model, and what is done with it alone."""

    model: Net
    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        self.log: Log = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, seed: int, blocks: int, scale: float = 1.0) -> Tensor:
        self.model.blocks_used = blocks
        self.model.shifts = seed % 3 > 0
        loss = (self.model(noise(seed, 4, INPUTS)) - noise(seed + 1, 4, INPUTS)).square().mean() * scale
        self.log.append(loss.detach().float())
        return loss

    def evaluate(self, seed: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(seed, 2)
        self.model.train()

    def forward(self, seed: int) -> None:
        """Without a backward, but with a graph."""
        self.loss(seed, 2)

    def fail_in_forward(self, seed: int) -> None:
        self.model.blocks[1].fails = True
        with pytest.raises(OutOfOrderError):
            self.loss(seed, 2)
        self.model.blocks[1].fails = False

    def schedule(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


class Plain(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_net()
        self.optimizer = make_optimizer(self.model)

    def backward(self, seed: int, blocks: int, scale: float, no_sync: bool) -> None:
        self.loss(seed, blocks, scale).backward()

    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = sum((g.double().square().sum() for g in gradients), torch.zeros(())).sqrt()
        if norm.isfinite():
            before = [p.grad for p in self.parameters]
            for p in self.parameters:
                if p.grad is not None:
                    p.grad = p.grad * min(1.0, CLIP / (norm.item() + 1e-6))
            self.optimizer.step()
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad
        self.log.append(norm.float() if norm.isfinite() else torch.tensor(float("nan")))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def fail_in_backward(self, seed: int) -> None:
        self.loss(seed, 2)
        self.optimizer.zero_grad()

    def look(self, what: str, index: int) -> None:
        p = self.parameters[index]
        if what == "param":
            value = p.detach().clone()
        elif what == "grad":
            value = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        else:
            value = self.optimizer.state[p].get("exp_avg", torch.zeros_like(p)).clone()
        self.log.append(value)

    def change(self, what: str, index: int, seed: int) -> None:
        p = self.parameters[index]
        value = noise(seed, *p.shape)
        if what == "param":
            p.data.copy_(value)
        elif what == "grad":
            p.grad = value
        elif p in self.optimizer.state:  # torch has no state before the first update
            self.optimizer.state[p]["exp_avg"].copy_(value)

    def modify(self, index: int, seed: int, fails: bool) -> None:
        p = self.parameters[index]
        if not fails:
            p.data[:1] += noise(seed, *p[:1].shape)

    def save_and_load(self) -> None:
        pass


class Ours(Subject):
    def __init__(
        self,
        streams: Streams,
        placement: penstock.Placement,
        precision: str,
        tile_bytes: int,
        overlap: str,
        stage: int = 3,
    ) -> None:
        super().__init__()
        self.model = make_net()
        self.optimizer: penstock.Optimizer = prepare_on(
            streams,
            self.model,
            make_optimizer(self.model),
            placement=placement,
            precision=precision,
            stage=stage,
            max_grad_norm=CLIP,
            overlap=overlap,
            options=penstock.Options(tile_bytes=tile_bytes),
        )

    def backward(self, seed: int, blocks: int, scale: float, no_sync: bool) -> None:
        with self.optimizer.no_sync() if no_sync else nullcontext():
            self.optimizer.backward(self.loss(seed, blocks, scale))

    def step(self) -> None:
        self.log.append(torch.tensor(self.optimizer.step().grad_norm))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def fail_in_backward(self, seed: int) -> None:
        loss = self.loss(seed, 2)

        def fail(grad: Tensor) -> None:
            raise OutOfOrderError

        loss.grad_fn.next_functions[0][0].register_prehook(fail)
        with pytest.raises(OutOfOrderError):
            self.optimizer.backward(loss)
        self.optimizer.zero_grad()

    def look(self, what: str, index: int) -> None:
        p = self.parameters[index]
        if what == "state":
            self.log.append(self.optimizer.full_state(p, "exp_avg"))
        else:
            self.log.append(getattr(self.optimizer, f"full_{what}")(p))

    def change(self, what: str, index: int, seed: int) -> None:
        p = self.parameters[index]
        value = noise(seed, *p.shape)
        if what != "state":
            getattr(self.optimizer, f"set_full_{what}")(p, value)
        elif self.optimizer.full_state(p, "step"):
            self.optimizer.set_full_state(p, "exp_avg", value)

    def modify(self, index: int, seed: int, fails: bool) -> None:
        p = self.parameters[index]
        with (
            pytest.raises(OutOfOrderError) if fails else nullcontext(),
            self.optimizer.gathered([p], modify=True),
            torch.no_grad(),
        ):
            p[:1] += noise(seed, *p[:1].shape).to(p.dtype)
            if fails:
                raise OutOfOrderError

    def save_and_load(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def finish(self) -> None:
        for index, what in product(range(len(self.parameters)), ("param", "state")):
            self.look(what, index)
        self.optimizer.close()


Operation = tuple[Any, ...]
seeds = st.integers(0, 50)
indices = st.integers(0, len(list(Net().parameters())) - 1)
looks = st.tuples(st.just("look"), st.sampled_from(["param", "grad", "state"]), indices)
changes = st.tuples(st.just("change"), st.sampled_from(["param", "grad", "state"]), indices, seeds)
backwards = st.tuples(st.just("backward"), seeds, st.sampled_from([1, 2]), st.just(1.0), st.booleans())
overflows = st.tuples(st.just("backward"), seeds, st.just(2), st.sampled_from([1e30, float("inf")]), st.just(False))
step, zero_grad = st.tuples(st.just("step")), st.tuples(st.just("zero_grad"))
others = st.one_of(
    looks,
    changes,
    overflows,
    st.tuples(st.just("forward"), seeds),
    st.tuples(st.just("evaluate"), seeds),
    st.tuples(st.just("schedule"), st.sampled_from([0.5, 2.0])),
    st.tuples(st.just("fail_in_forward"), seeds),
    st.tuples(st.just("fail_in_backward"), seeds),
    st.tuples(st.just("modify"), indices, seeds, st.booleans()),
    st.tuples(st.just("save_and_load")),
)


@st.composite
def sequences(draw: Any) -> list[Operation]:
    """Training as it goes, with anything else at any moment; steps and zero_grad may be left out."""
    sequence: list[Operation] = []
    for _ in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(0, 3))):
            sequence += [draw(backwards), *draw(st.lists(others, max_size=1))]
        kinds = [(step, zero_grad), (step, zero_grad), (step,), (zero_grad,), ()]
        for kind in draw(st.sampled_from(kinds)):
            sequence += [draw(kind), *draw(st.lists(st.one_of(looks, changes, others), max_size=1))]
    return sequence


tiers = st.sampled_from(["device", "cpu", "nvme"])
splits = st.sampled_from([(0.5, 0.5, 0.0), (0.3, 0.0, 0.7), (0.0, 0.6, 0.4), (0.4, 0.4, 0.2)]).map(
    lambda parts: dict(zip(("device", "cpu", "nvme"), parts, strict=True))
)
storages = st.one_of(tiers, splits)
placements = st.builds(
    penstock.Placement, params=storages, grads=storages, optimizer=storages, nvme_path=st.integers(1, 2).map(disks)
)
overlaps = st.sampled_from(["none", "forward", "auto"])


def apply(subject: Subject, sequence: list[Operation]) -> None:
    for name, *arguments in sequence:
        getattr(subject, name)(*arguments)


def run(make: Callable[[], Streams], sequence: list[Operation], *arguments: Any) -> Log:
    subject = Ours(make(), *arguments)
    apply(subject, sequence)
    subject.finish()
    return subject.log


def assert_same(ours: Log, theirs: Log) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@examples(20)
@given(sequences(), placements, st.sampled_from(["fp32", "bf16"]), st.sampled_from([4096, 1 << 22]), overlaps)
def test_one_trajectory(
    sequence: list[Operation], placement: penstock.Placement, precision: str, tile_bytes: int, overlap: str
) -> None:
    at_once = run(inline, sequence, penstock.Placement(), precision, tile_bytes, "none")
    how = placement, precision, tile_bytes, overlap
    assert_same(run(inline, sequence, *how), at_once)
    assert_same(run(separate, sequence, *how), at_once)
    assert_same(run(lambda: simulated(most_seconds=0.0005), sequence, *how), at_once)
    if precision == "fp32":
        plain = Plain()
        apply(plain, sequence)
        for index, what in product(range(len(plain.parameters)), ("param", "state")):
            plain.look(what, index)
        assert len(plain.log) == len(at_once)
        for ours, theirs in zip(at_once, plain.log, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6, equal_nan=True)
