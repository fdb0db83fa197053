"""Gradients after every backward are plain torch's, bit for bit, in whatever order losses and backwards come."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.errors import EngineError
from penstock.runtime.streams import Streams
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, late, separate
from tests.parity.compare import NAMES
from tests.parity.rows import INPUTS, Arithmetic, Movement, changed, make_model, prepared, shares, sum_in_pairs

SMALL = {"tile_bytes": 4 << 10}
ROWS = (
    Arithmetic(),
    Arithmetic(precision="bf16"),
    Arithmetic(precision="bf16", accumulation_dtype=torch.float32),
)


MOVEMENTS: tuple[tuple[Callable[[], Streams], Movement], ...] = (
    (inline, Movement(grads="device").but(**SMALL)),
    (inline, Movement(grads="nvme").but(**SMALL)),
    (separate, Movement(grads="cpu").but(**SMALL)),
    (separate, Movement(grads=shares(0.3, 0.4, 0.3), optimizer=shares(0.6, 0.4)).but(**SMALL)),
    (late, Movement(params="cpu", grads="cpu", optimizer="cpu").but(**SMALL)),
    (late, Movement(params="nvme", grads="nvme", optimizer="nvme").but(**SMALL)),
    (late, Movement(grads=shares(0.5, 0.5)).but(**SMALL)),
)


@dataclass
class Backward:
    """A backward that is due: of which loss, and how."""

    loss: Tensor
    retain_graph: bool = False
    no_sync: bool = False


#: Forward of the batch of a number.
Forward = Callable[[int], Tensor]
Program = Callable[[Forward], Iterator[Backward]]


def one(forward: Forward) -> Iterator[Backward]:
    yield Backward(forward(0).square().mean())


def three(forward: Forward) -> Iterator[Backward]:
    for number in range(1, 4):
        yield Backward(forward(number).square().mean())


def two_losses_of_one_forward(forward: Forward) -> Iterator[Backward]:
    y = forward(4)
    yield Backward(y.square().mean(), retain_graph=True)
    yield Backward(y.abs().mean())


def two_forwards_and_then_their_backwards(forward: Forward) -> Iterator[Backward]:
    losses = [forward(number).square().mean() for number in (5, 6)]
    yield from map(Backward, losses)


def the_other_way_round(forward: Forward) -> Iterator[Backward]:
    losses = [forward(number).square().mean() for number in (7, 8)]
    yield from map(Backward, losses[::-1])


def a_graph_that_is_walked_three_times(forward: Forward) -> Iterator[Backward]:
    loss = forward(9).square().mean()
    yield Backward(loss, retain_graph=True)
    yield Backward(loss, retain_graph=True)
    yield Backward(loss)


def a_retained_graph_after_another_forward(forward: Forward) -> Iterator[Backward]:
    loss = forward(10).square().mean()
    yield Backward(loss, retain_graph=True)
    yield Backward(forward(11).abs().mean())
    yield Backward(loss)


def held_back(forward: Forward) -> Iterator[Backward]:
    for number in (12, 13):
        yield Backward(forward(number).square().mean(), no_sync=True)
    yield Backward(forward(14).square().mean())
    yield Backward(forward(15).square().mean())


#: One step each.
PROGRAMS: tuple[Program, ...] = (
    one,
    three,
    two_losses_of_one_forward,
    two_forwards_and_then_their_backwards,
    the_other_way_round,
    a_graph_that_is_walked_three_times,
    a_retained_graph_after_another_forward,
    held_back,
)


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(6, INPUTS, generator=torch.Generator().manual_seed(100 * rank + number))


class Plain:
    """Ranks one after the other, each with the same weights."""

    def __init__(self, what: Arithmetic, world_size: int, *, holds_back: bool) -> None:
        self.what, self.world_size, self.holds_back = what, world_size, holds_back
        self.model = make_model().to(what.compute)

    def gradients(self, program: Program) -> list[list[Tensor] | None]:
        """The gradients after each backward; `None` where they are held back."""
        of_ranks = [self._of_rank(program, rank) for rank in range(self.world_size)]
        sums: list[Tensor] | None = None
        after: list[list[Tensor] | None] = []
        held: list[list[Tensor]] | None = None
        for backwards in zip(*of_ranks, strict=True):
            gradients = [g for _, g in backwards]
            follows = self.holds_back and backwards[0][0]
            if follows or held is not None:
                rounded = [[g.to(self.what.accumulate) for g in of_rank] for of_rank in gradients]
                pairs = zip(held or rounded, rounded, strict=True)
                held = rounded if held is None else [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
                if follows:
                    after.append(None)
                    continue
                gradients, held = held, None
            reduced = [sum_in_pairs([g.to(self.what.reduce) for g in parts]) for parts in zip(*gradients, strict=True)]
            before = sums or [torch.zeros_like(r, dtype=self.what.accumulate) for r in reduced]
            sums = [(s.float() + r.float()).to(self.what.accumulate) for s, r in zip(before, reduced, strict=True)]
            after.append([s.float() / self.world_size for s in sums])
        return after

    def _of_rank(self, program: Program, rank: int) -> list[tuple[bool, list[Tensor]]]:
        found = []
        for due in program(lambda number: self.model(batch(number, rank).to(self.what.compute)).float()):
            due.loss.backward(retain_graph=due.retain_graph)
            found.append((due.no_sync, [p.grad for p in self.model.parameters()]))
            self.model.zero_grad()
        return found


def check(
    what: Arithmetic, make: Callable[[], Streams], how: Movement, rank: int = 0, world_size: int = 1
) -> list[str]:
    """What differs from plain torch, in any program."""
    model, optimizer = prepared(what, how, make())
    plain = Plain(what, world_size, holds_back=world_size > 1 and how.stage < 2)
    failures = []
    for program in PROGRAMS:
        expected = plain.gradients(program)
        dues = program(lambda number: model(batch(number, rank)).float())
        for number, (due, theirs) in enumerate(zip(dues, expected, strict=True)):
            with optimizer.no_sync() if due.no_sync else nullcontext():
                optimizer.backward(due.loss, retain_graph=due.retain_graph)
            if theirs is None:
                with pytest.raises(EngineError, match="not reduced yet"):
                    optimizer.full_grad(next(model.parameters()))
                continue
            # A fifth of the parameters after each backward: others after the next.
            for name, p, q in [*zip(NAMES, model.parameters(), theirs, strict=True)][number % 5 :: 5]:
                if not torch.equal(optimizer.full_grad(p), q):
                    failures.append(f"{program.__name__}: {name} after backward {number}")
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.gathered(), torch.no_grad():
            for p, q in zip(model.parameters(), plain.model.parameters(), strict=True):
                q.copy_(p)
    optimizer.close()
    return failures


@pytest.mark.parametrize("what", ROWS, ids=changed)
def test_gradients_are_plain_torchs_after_every_backward(what: Arithmetic) -> None:
    for make, how in MOVEMENTS if what == ROWS[-1] else MOVEMENTS[ROWS.index(what) :: 3]:
        assert check(what, make, how) == [], (make.__name__, changed(how))


def check_rank(rank: int) -> list[str]:
    failures = []
    for stage, what in ((3, ROWS[2]), (2, ROWS[0]), (1, ROWS[2]), (0, ROWS[1])):
        for make, how in MOVEMENTS[stage::4]:
            found = check(what, make, how.but(stage), rank, 2)
            failures += [f"{make.__name__} {changed(how.but(stage))} {message}" for message in found]
    return failures


def test_gradients_are_plain_torchs_after_every_backward_on_two_ranks() -> None:
    assert run_ranks(check_rank, 2) == [[], []]
