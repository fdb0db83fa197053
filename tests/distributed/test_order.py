"""The order of collectives, ours and the user's, is that of the program on every rank, whatever a rank waits for."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.runtime import collectives
from penstock.runtime.streams import Streams
from penstock.tiers.nvme import FileRecords
from tests.distributed.wires import hybrid
from tests.lib.engines import prepared
from tests.lib.memory import shorten_rings
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import Movement

WIDTH, BLOCKS, STEPS = 32, 5, 3
MOST_SECONDS = 0.01
SOON_SECONDS = 60.0
SMALL = {"tile_bytes": 4 << 10, "prefetch_bytes": 16 << 10}
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(**SMALL)
UPDATED_FROM_FILES = Movement(params="cpu", grads="cpu", optimizer="nvme", overlap="forward").but(**SMALL)


class Mean(torch.autograd.Function):
    """Over the ranks of a group, of the value and of its gradient, as in a batch norm of several ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad / dist.get_world_size(ctx.group), None


class Centred(nn.Module):
    """A block that says something to other ranks in forward and in backward."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.tanh(y - Mean.apply(y.mean(0), self.group))


def make_model(group: Any = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*(Centred(group) for _ in range(BLOCKS)))


class Late:
    """A transfer that takes longer."""

    def __init__(self, transfer: Any, seconds: float) -> None:
        self._transfer = transfer
        self._until = time.monotonic() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self._until - time.monotonic()))
        self._transfer.wait()

    def check(self, found: int) -> None:
        self._transfer.check(found)

    def done(self) -> bool:
        return time.monotonic() >= self._until and bool(self._transfer.done())

    @property
    def ended(self) -> float:
        return max(self._until, float(self._transfer.ended))


@contextmanager
def late_reads(seed: int) -> Iterator[None]:
    """Files are read at a pace of this rank's own."""
    delays, read = random.Random(seed), FileRecords.load

    def late(records: FileRecords, number: int, buffer: Tensor, **how: Any) -> Any:
        transfer = read(records, number, buffer, **how)
        return None if transfer is None else Late(transfer, delays.uniform(0, MOST_SECONDS))

    with pytest.MonkeyPatch.context() as patch:
        shorten_rings(patch)
        patch.setattr(FileRecords, "load", late)
        yield


def train(rank: int, streams: Streams, how: Movement, *, group: Any = None, mesh: Any = None) -> list[Tensor]:
    """What is seen of some steps; the user has a metric of his own summed after each forward."""
    model, optimizer = prepared(
        make_model(group),
        streams,
        stage=how.stage,
        placement=how.placement,
        units=(Centred,),
        mesh=mesh,
        overlap=how.overlap,
        **dict(how.options),
    )
    seen = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x).square().mean()
        metric = loss.detach().clone()
        dist.all_reduce(metric)
        optimizer.backward(loss)
        seen += [metric, torch.tensor(optimizer.step().grad_norm)]
        optimizer.zero_grad()
    seen += [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return seen


def differences(ours: list[Tensor], theirs: list[Tensor]) -> list[int]:
    return [number for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


def beside_a_users_own(rank: int) -> list[int]:
    expected = train(rank, inline(), Movement(overlap="none"))
    with late_reads(rank):
        return differences(train(rank, simulated(7 + rank), UPDATED_FROM_FILES), expected)


def test_a_batch_norm_of_several_ranks_trains_as_without_offload() -> None:
    assert run_ranks(beside_a_users_own, 2) == [[], []]


def beside_tensor_parallelism(rank: int) -> list[list[int]]:
    mesh = hybrid()
    found = []
    for name in ("replicate", "shard"):
        group = mesh.get_group(name)
        expected = train(rank, inline(), Movement(overlap="none"), group=group, mesh=mesh)
        with late_reads(rank):
            found.append(differences(train(rank, separate(), IN_FILES, group=group, mesh=mesh), expected))
    return found


def test_collectives_of_the_user_on_the_groups_of_the_mesh_keep_their_order() -> None:
    assert run_ranks(beside_tensor_parallelism, 4) == [[[], []]] * 4


@contextmanager
def noted(calls: list[tuple[str, bool]]) -> Iterator[None]:
    """Every collective of the process in the order in which it is issued, and whether this thread issues it."""
    own = threading.get_ident()

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            whose = "ours" if kwargs.get("group") not in (None, dist.group.WORLD) else "the user's"
            calls.append((f"{whose}: {name} of {args[0].numel()}", threading.get_ident() == own))
            return call(*args, **kwargs)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast"):
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        for name in ("all_gather_flat", "reduce_scatter_flat"):
            patch.setattr(collectives, name, noting(name, getattr(collectives, name)))
        yield


def calls_of(rank: int) -> list[list[tuple[str, bool]]]:
    found = []
    in_backward = Movement(params="cpu", grads="nvme", optimizer="cpu", overlap="backward").but(**SMALL)
    for how in (IN_FILES, UPDATED_FROM_FILES, in_backward):
        calls: list[tuple[str, bool]] = []
        with late_reads(rank), noted(calls):
            train(rank, separate(), how)
        found.append(calls)
    return found


def test_ranks_issue_all_collectives_in_one_order_from_the_threads_of_the_program() -> None:
    """The same order among ours and the user's is what communicators of a device need as well."""
    for first, second in zip(*run_ranks(calls_of, 2), strict=True):
        assert [name for name, _ in first] == [name for name, _ in second]
        assert {name.split(":")[0] for name, _ in first} == {"ours", "the user's"}
        assert all(by_caller for _, by_caller in (*first, *second))


class Read(threading.Event):
    """A read that is over when it is let."""

    def __init__(self, transfer: Any, let: threading.Event) -> None:
        super().__init__()
        self._transfer, self._let = transfer, let

    def wait(self, timeout: float | None = None) -> bool:
        assert self._let.wait(SOON_SECONDS), "nobody was to wait for it yet"
        self._transfer.wait()
        return True

    def done(self) -> bool:
        return self._let.is_set() and bool(self._transfer.done())


def forward_while_the_last_is_read(rank: int) -> bool:
    """The file of the last unit is read once the first one's forward has run, and its gather was started before."""
    let, read = threading.Event(), FileRecords.load
    started = threading.Event()

    def gated(records: FileRecords, number: int, buffer: Tensor) -> Any:
        transfer = read(records, number, buffer)
        if records.plan.cells[0].unit != f"{BLOCKS - 1}" or transfer is None:
            return transfer
        started.set()
        return Read(transfer, let)

    with pytest.MonkeyPatch.context() as patch:
        shorten_rings(patch, 8)
        patch.setattr(FileRecords, "load", gated)
        model, optimizer = prepared(make_model(), params="nvme", units=(Centred,))
        model[0].register_forward_hook(lambda *_: let.set() if started.is_set() else None)
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        optimizer.close()
    return started.is_set()


def test_a_unit_that_is_being_read_holds_nobody_up_before_its_turn() -> None:
    assert run_ranks(forward_while_the_last_is_read, 2) == [True, True]


def keep_views(rank: int) -> list[Tensor]:
    """Somebody on rank 0 keeps views of all weights, whose memory cannot go. Ranks gather ahead of use alike."""
    kept = []
    model = make_model()
    for block in model:
        block.register_forward_hook(
            lambda module, *_: kept.append(module.linear.weight.detach()) if rank == 0 else None
        )
    live_bytes = 3 * (WIDTH * WIDTH + 256) * 4  # of three blocks
    model, optimizer = prepared(model, params="cpu", units=(Centred,), live_bytes=live_bytes)
    seen = []
    for _ in range(STEPS):
        loss = model(torch.ones(2, WIDTH)).square().sum()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    optimizer.close()
    return seen


def test_views_that_one_rank_keeps_do_not_change_what_it_gathers_ahead() -> None:
    first, second = run_ranks(keep_views, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
