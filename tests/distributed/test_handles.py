"""Gradients in `.grad` on two ranks: torch's clipping over ranks, and what the ranks do to them must be the same."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import penstock
from penstock.errors import PenstockError
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate
from tests.support import run_ranks

WIDTH = 16


class Experts(nn.Module):
    """The first rank's data goes through one, the second rank's through another; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.experts[rank](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.last(torch.tanh(self.experts(torch.tanh(self.first(x)), rank)))


def loss_of(model: nn.Module, rank: int, seed: int = 0) -> Tensor:
    data = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))
    return model(data, rank).float().square().sum()


def prepared(stage: int = 3, streams: Any = separate, **rest: Any) -> tuple[Net, penstock.Optimizer]:
    model = Net()
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    placement = penstock.Placement(params="cpu" if stage == 3 else "device")
    return model, prepare_on(
        streams(), model, given, precision="fp32", stage=stage, placement=placement, units=(Experts,), **rest
    )


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


CLIPS: dict[str, Callable[[nn.Module], Tensor]] = {
    "all": lambda net: clip_grad_norm_(net.parameters(), 0.3),
    "foreach": lambda net: clip_grad_norm_(net.parameters(), 0.3, foreach=True),
    "the greatest": lambda net: clip_grad_norm_(net.parameters(), 0.01, math.inf),
    "groups": lambda net: clip_grad_norm_(net.first.parameters(), 0.1) + clip_grad_norm_(net.experts.parameters(), 0.1),
}


def clip_at(rank: int, stage: int) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for name, clip in CLIPS.items():
        model, optimizer = prepared(stage)
        reference = Net()
        stock = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for seed in range(2):
            loss_of(model, rank, seed).backward()
            for other in range(2):
                (loss_of(reference, other, seed) / 2).backward()
            norms = clip(model), clip(reference)
            if not torch.allclose(*norms, rtol=1e-6, atol=0):
                wrong.append(f"{name}: norms {norms}")
            optimizer.step()
            stock.step()
            optimizer.zero_grad()
            stock.zero_grad()
        for (what, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if not torch.allclose(optimizer.full_param(p), q, rtol=1e-6, atol=1e-7):
                wrong.append(f"{name}: {what}")
        optimizer.close()
    return wrong


def test_torchs_clipping_is_that_of_averaged_gradients() -> None:
    for stage in (0, 1, 3):
        assert run_ranks(clip_at, 2, stage) == [[], []]


def count_meetings(rank: int) -> list[int]:
    model, optimizer = prepared()
    control_group = optimizer._engine.context.ranks.control_group
    meet, count = control_group._meet, []
    control_group._meet = lambda *values: count.append(1) or meet(*values)
    found = []
    for clip in (
        *list(CLIPS.values())[:2],
        lambda net: get_total_norm([p.grad for p in net.parameters() if p.grad is not None]),
    ):
        loss_of(model, rank).backward()
        del count[:]
        clip(model)
        [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found.append(len(count))
        optimizer.zero_grad()
    optimizer.close()
    return found


def test_one_meeting_for_all_norms() -> None:
    assert run_ranks(count_meetings, 2) == [[1, 1, 1]] * 2


def what_ranks_set(rank: int) -> dict[str, str]:
    found = {}

    def run(name: str, change: Callable[[Net], object], verb: Callable[[Net, penstock.Optimizer], object]) -> None:
        model, optimizer = prepared()
        loss_of(model, rank).backward()
        before = [optimizer.full_param(p) for p in model.parameters()]
        change(model)
        found[name] = said_by(lambda: verb(model, optimizer))
        if found[name]:
            assert all(torch.equal(optimizer.full_param(p), q) for p, q in zip(model.parameters(), before, strict=True))
            optimizer.zero_grad()
        loss_of(model, rank).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        assert not optimizer.step().skipped
        optimizer.close()

    def assign(model: Net, value: float) -> None:
        model.first.weight.grad = torch.full((WIDTH, WIDTH), value)

    def step(model: Net, optimizer: penstock.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    run("the same", lambda model: assign(model, 0.5), step)
    run("its own", lambda model: assign(model, 0.5 + rank), step)

    def clip_later(model: Net, optimizer: penstock.Optimizer) -> None:
        with torch.no_grad():
            loss_of(model, rank)  # takes over what was set
        clip_grad_norm_(model.parameters(), 1.0)

    run("its own, clipped", lambda model: assign(model, 0.5 + rank), clip_later)
    run("one alone", lambda model: rank or assign(model, 0.5), step)
    run("one drops", lambda model: rank or setattr(model.first.weight, "grad", None), step)
    run("one drops all", lambda model: rank or [setattr(p, "grad", None) for p in model.parameters()], step)
    run("scaled apart", lambda model: model.first.weight.grad.mul_(0.5 + rank), step)
    run(
        "all scaled apart",
        lambda model: [p.grad.mul_(0.5 + rank) for p in model.parameters() if p.grad is not None],
        step,
    )
    run("one clips", lambda model: None, lambda m, o: o.step() if rank else clip_grad_norm_(m.parameters(), 1.0))
    return found


def test_what_ranks_do_to_gradients_must_be_the_same() -> None:
    both = run_ranks(what_ranks_set, 2)
    for found in both:
        assert found.pop("the same") == ""
        assert "Ranks are out of step" in (said := found.pop("one clips"))
        assert "step()" in said
        assert "the norm of gradients (torch.nn.utils.clip_grad_norm_" in said
        assert "Ranks differ in the gradient that was set for 'first.weight'" in found.pop("its own")
        assert "Ranks differ in the gradient that was set for 'first.weight'" in found.pop("its own, clipped")
        assert "Ranks differ in the gradient that was set for 'first.weight'" in found.pop("one alone")
        assert "Ranks differ in the gradient that was dropped of 'first.weight'" in found.pop("one drops")
        assert "Ranks differ in gradients that were dropped" in found.pop("one drops all")
        assert "Ranks differ in the factor of the gradient of 'first.weight'" in found.pop("scaled apart")
        assert "Ranks differ in the scale of gradients" in found.pop("all scaled apart")
        assert not found


def one_looks(rank: int) -> str:
    model, optimizer = prepared(streams=inline, options=penstock.Options(timeout_s=1))
    loss_of(model, rank).backward()
    said = "" if rank else said_by(lambda: get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    dist.barrier()
    optimizer.close(keep_params=False)
    return said


def test_a_norm_on_one_rank_alone_ends_at_the_timeout() -> None:
    said, _ = run_ranks(one_looks, 2)
    assert "hears nothing from another one in the norm of gradients" in said
    assert "; rank 1 says nothing: " in said


def held_back(rank: int) -> list[str]:
    model, optimizer = prepared(1)
    with optimizer.no_sync():
        loss_of(model, rank).backward()
    said = [
        said_by(lambda: clip_grad_norm_(model.parameters(), 1.0)),
        said_by(lambda: model.first.weight.grad.mul_(0.5)),
    ]
    loss_of(model, rank).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    assert not optimizer.step().skipped
    said.append(said_by(lambda: nn.parallel.DistributedDataParallel(model)))
    optimizer.close()
    return said


def test_what_is_not_reduced_is_not_clipped_and_ddp_is_refused() -> None:
    for first, second, third in run_ranks(held_back, 2):
        assert "Gradients of no_sync micro-batches are not reduced yet" in first
        assert "Gradients of no_sync micro-batches are not reduced yet" in second
        assert "DistributedDataParallel was put around a prepared Net" in third
