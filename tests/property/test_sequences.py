"""Random sequences of training, of moves and of anything else: one trajectory, wherever state is and however late.

A sequence runs at once with all on the device, and with moves between and inside of its operations, on other streams
and tiers, on one rank and on two; `programmes.py` compares with plain torch. `make fuzz` draws others, from SEED on.
"""

import random
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.streams import Streams
from tests.accounts import assert_table_agrees
from tests.lib.engines import prepare_on, same_bits
from tests.lib.fuzz import SEED, TIMES
from tests.lib.memory import disks
from tests.lib.models import seeded
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, late, separate
from tests.property.programmes import KINDS, Operation, OutOfOrderError, noise

WIDTH, INPUTS = 24, 6
WHERE: list[Any] = [
    *("device", "cpu", "cpu", "nvme"),
    *({"device": 0.5, "cpu": 0.5}, {"device": 0.3, "nvme": 0.7}, {"cpu": 0.6, "nvme": 0.4}),
    {"device": 0.4, "cpu": 0.4, "nvme": 0.2},
]


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


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The large eps keeps Adam from blowing up a last bit where a gradient is near zero."""
    first, *rest = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": rest, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, foreach=False)


class Loop:
    """A training loop that notes what it sees."""

    def __init__(
        self, streams: Streams, placement: penstock.Placement, precision: str, overlap: str, stage: int
    ) -> None:
        self.log: list[Tensor] = []
        self.model = seeded(Net, 1)
        self.optimizer: penstock.Optimizer = prepare_on(
            streams,
            self.model,
            make_optimizer(self.model),
            placement=placement,
            precision=precision,
            stage=stage,
            max_grad_norm=1.0,
            overlap=overlap,
            options=penstock.Options(tile_bytes=4096),
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def run(self, sequence: list[Operation]) -> None:
        for name, *arguments in sequence:
            getattr(self, name)(*arguments)

    # What is trained

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

    # How it moves

    def offload(self, kinds: tuple[str, ...] | None, to: str, non_blocking: bool, keep: bool) -> None:
        self.optimizer.offload_states(kinds, to, non_blocking=non_blocking, keep=keep)
        if not non_blocking:
            for kind in kinds or KINDS:
                self.optimizer.locations().assert_on(kind, to)
            assert_table_agrees(self.optimizer)

    def reload(self, non_blocking: bool) -> None:
        self.optimizer.reload_states(non_blocking=non_blocking)

    def report(self) -> None:
        assert str(self.optimizer.locations())

    def settle(self) -> None:
        self.optimizer.synchronize()
        self.optimizer._engine.offloader._cleaned.synchronize()
        assert_table_agrees(self.optimizer)

    def inside(self, moves: list[Operation]) -> None:
        """The next forward makes these moves, in a block that is under way."""

        def move(*_: Any) -> None:
            handle.remove()
            self.run(moves)

        handle = self.model.blocks[0].second.register_forward_pre_hook(move)

    def behind(self, moves: list[Operation]) -> None:
        """The next backward makes these moves, where it passes the output of a block."""

        def watch(module: Any, args: Any, output: Any) -> None:
            handle.remove()
            if output.requires_grad:
                output.register_hook(lambda grad: self.run(moves))

        handle = self.model.blocks[0].first.register_forward_hook(watch)

    def among(self, moves: list[Operation], fails: bool) -> None:
        """Moves while all parameters are gathered."""
        with pytest.raises(penstock.PenstockError) if fails else self.optimizer.gathered(modify=True):
            if not fails:
                self.run(moves)
                return
            with self.optimizer.gathered(modify=True):
                for p in self.parameters:
                    p.data.add_(1.0)
                self.run(moves)
                raise penstock.PenstockError("left")


def random_move(chance: random.Random) -> Operation:
    what = chance.choice(["offload", "offload", "reload", "report", "settle"])
    if what == "offload":
        some = tuple(chance.sample(KINDS, chance.randint(1, 4)))
        to, non_blocking, keep = chance.choice(["cpu", "nvme"]), chance.random() < 0.5, chance.random() < 0.5
        return what, chance.choice([None, some]), to, non_blocking, keep
    return (what, chance.random() < 0.5) if what == "reload" else (what,)


def random_other(chance: random.Random) -> Operation:
    seed, index = chance.randint(0, 50), chance.randrange(len(list(Net().parameters())))
    what = chance.choice(["param", "grad", "state"])
    return chance.choice(
        [
            ("look", what, index),
            ("change", what, index, seed),
            ("backward", seed, 2, chance.choice([1e30, float("inf")]), False),  # the step is skipped
            ("forward", seed),
            ("evaluate", seed),
            ("schedule", chance.choice([0.5, 2.0])),
            ("fail_in_forward", seed),
            ("fail_in_backward", seed),
            ("modify", index, seed, chance.random() < 0.5),
            ("save_and_load",),
        ]
    )


def random_sequence(seed: int) -> tuple[list[Operation], list[Operation]]:
    """Training as it goes, with anything else at any moment; and the same with moves. Alike on every rank."""
    chance = random.Random(seed)
    plain: list[Operation] = []
    moving: list[Operation] = []

    def move() -> None:
        for _ in range(chance.randint(0, 2)):
            some = [random_move(chance) for _ in range(chance.randint(1, 2))]
            where = chance.choice(["here", "here", "inside", "behind", "among"])
            moving.extend({"here": some, "among": [(where, some, chance.random() < 0.3)]}.get(where, [(where, some)]))

    def do(*operations: Operation) -> None:
        for operation in operations:
            for each in (operation, *([random_other(chance)] if chance.random() < 0.3 else [])):
                move()
                plain.append(each)
                moving.append(each)

    for _ in range(chance.randint(2, 4)):
        for _ in range(chance.randint(0, 3)):
            do(("backward", chance.randint(0, 50), chance.choice([1, 2]), 1.0, chance.random() < 0.4))
        if chance.random() < 0.8:
            do(("backward", chance.randint(0, 50), 2, 1.0, False))
        do(*chance.choice([[("step",), ("zero_grad",)]] * 3 + [[("step",)], [("zero_grad",)]]))
    return plain, moving


def check_rank(rank: int, stage: int, seeds: range) -> list[str]:
    """What went another way."""
    failures = []
    for seed in seeds:
        plain, moving = random_sequence(seed)
        chance = random.Random(seed)
        storages = {kind: chance.choice(WHERE) for kind in ("params", "grads", "optimizer")}
        overlap, precision = chance.choice(["none", "forward", "auto"]), chance.choice(["fp32", "bf16"])
        name, streams = chance.choice([("inline", inline), ("separate", separate), ("late", late), ("late", late)])
        logs = []
        for sequence, make, where, when in ((plain, inline, {}, "none"), (moving, streams, storages, overlap)):
            loop = Loop(make(), penstock.Placement(**where, nvme_path=disks(2)), precision, when, stage)
            loop.run(sequence)
            loop.finish()
            logs.append([value.nan_to_num(7.0) for value in loop.log])
        if not all(map(same_bits, *logs)) or len(logs[0]) != len(logs[1]):
            failures.append(f"stage {stage}, seed {seed}: {name} {storages} {overlap} {precision}\n{moving}")
    return failures


pytestmark = [pytest.mark.fuzz, pytest.mark.filterwarnings("ignore:The step was skipped")]


def test_one_trajectory() -> None:
    assert check_rank(0, 3, range(SEED, SEED + 24 * TIMES)) == []


def check_stages(rank: int) -> list[str]:
    first = SEED + 1000
    return [each for stage in range(4) for each in check_rank(rank, stage, range(first + stage, first + 8 * TIMES, 4))]


def test_one_trajectory_on_two_ranks() -> None:
    assert run_ranks(check_stages, 2) == [[], []]
