"""Moves at will: values, the table, memory and files, at every place where a move may be made."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ConfigError, EngineError, MemoryBudgetError, NvmeError
from penstock.runtime.host_memory import HostMemory
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import UPDATE, Streams
from tests.accounts import allocations, assert_table_agrees, file_bytes, tensor_bytes
from tests.faults.failing_files import Faults
from tests.lib.covering import covering
from tests.lib.engines import prepare_on
from tests.lib.memory import shorten_rings
from tests.lib.ranks import run_ranks
from tests.lib.streams import BreakingStreams, BrokenError, inline, separate, simulated

WIDTH = 96
KINDS = ("param", "grad", "master", "optimizer")
BACK_ENDS = [inline, separate, simulated]
TIERS = ("device", "cpu", "nvme")
#: Where state is, where it is sent, whether the move is waited for.
MOVES = {"make": tuple(BACK_ENDS), "storage": TIERS, "to": ("cpu", "nvme"), "blocking": (True, False)}
IN_FLIGHT = [
    {"make": simulated, "storage": storage, "to": to, "blocking": False}
    for storage, to in (("device", "cpu"), ("cpu", "nvme"))
]


class Block(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.checkpointed = False
        self.opaque = False

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.compute, x, use_reentrant=False) if self.checkpointed else self.compute(x)
        return Opaque(x) if self.opaque else x

    def compute(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Opaque:
    """An output that cannot be looked into."""

    __slots__ = ("_get",)

    def __init__(self, value: Tensor) -> None:
        self._get = lambda: value


class Net(nn.Module):
    """Blocks, one of which is half frozen, and a weight that is used on both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(frozen=True), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x = x._get() if isinstance(x, Opaque) else x
        return x @ self.embed.weight


def prepared(
    streams: Streams, folder: Path | None = None, options: dict[str, Any] | None = None, **rest: Any
) -> tuple[Net, penstock.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    storages = {kind: rest.pop(kind) for kind in ("params", "grads", "optimizer") if kind in rest}
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    settings = penstock.Options(**{"tile_bytes": 4096, **(options or {})})
    placement = penstock.Placement(**storages, nvme_path=folder)
    return model, prepare_on(streams, model, given, placement=placement, options=settings, **rest)


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Net, seed: int = 0) -> Tensor:
    return model(inputs(seed)).float().square().mean()


def backward(model: Net, optimizer: penstock.Optimizer, seed: int = 0) -> float:
    loss = loss_of(model, seed)
    optimizer.backward(loss)
    return loss.item()


def train(model: Net, optimizer: penstock.Optimizer, seed: int = 0) -> float:
    loss = backward(model, optimizer, seed)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state(model: Net, optimizer: penstock.Optimizer) -> list[Tensor]:
    """Every value of every kind."""
    values = [optimizer.full_param(p) for p in model.parameters()]
    for p in model.parameters():
        if p.requires_grad:
            values += [optimizer.full_grad(p), *(optimizer.full_state(p, n) for n in ("exp_avg", "exp_avg_sq", "step"))]
    return values


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# Values, the table, memory


@pytest.mark.parametrize(
    ("make", "storage", "to", "blocking"), [tuple(row.values()) for row in covering(MOVES, first=IN_FLIGHT)]
)
def test_every_kind_goes_there_and_back(
    make: Callable[[], Streams], storage: str, to: str, blocking: bool, tmp_path: Path
) -> None:
    model, optimizer = prepared(make(), tmp_path, params=storage, grads=storage, optimizer=storage)
    train(model, optimizer)
    backward(model, optimizer, 1)
    before, rows = state(model, optimizer), optimizer.locations().to_dict()["bytes"]
    for kind in (*KINDS, None):
        optimizer.offload_states(None if kind is None else {kind}, to, non_blocking=not blocking)
        if blocking:
            assert_table_agrees(optimizer, tmp_path)
        report = optimizer.locations()
        for other in KINDS:
            report.assert_on(other, to if kind in (None, other) else storage)
        assert_equal(state(model, optimizer), before)
        optimizer.reload_states(non_blocking=not blocking)
        assert_equal(state(model, optimizer), before)
        optimizer._engine.offloader._cleaned.synchronize()
        assert_table_agrees(optimizer, tmp_path)
        again = optimizer.locations().to_dict()["bytes"]
        assert {k: v for k, v in again.items() if k in rows and k not in ("staging", "gathered")} == {
            k: v for k, v in rows.items() if k not in ("staging", "gathered")
        }
    optimizer.step()
    optimizer.close()
    assert file_bytes(tmp_path) == 0


@pytest.mark.parametrize("to", ["cpu", "nvme"])
@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_device_memory_falls_to_what_is_left(storage: str, to: str, tmp_path: Path) -> None:
    """Every tensor that Python sees, the cpu tier's slabs aside: nothing keeps a copy, or a buffer of gradients."""
    bare = tensor_bytes()
    model, optimizer = prepared(separate(), tmp_path, params=storage, grads=storage, optimizer="device")
    train(model, optimizer)
    backward(model, optimizer)
    held = tensor_bytes()
    moved = optimizer.locations().bytes(tier="device")
    assert moved > 100_000
    optimizer.offload_states(to=to)
    assert optimizer.locations().bytes(tier="device") == 0
    assert held - tensor_bytes() >= moved
    assert tensor_bytes() - bare < 4096, "placeholders, norms and flags"
    optimizer.reload_states()
    assert optimizer.locations().bytes(tier="device") <= moved
    optimizer.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_what_autograd_saved_holds_no_copy(blocking: bool, tmp_path: Path) -> None:
    """Between forward and backward: the graph holds views of weights, whose storage is empty until backward."""
    model, optimizer = prepared(separate(), tmp_path)
    expected = prepared(separate(), tmp_path)
    train(model, optimizer)
    train(*expected)
    loss = loss_of(model, 1)
    seen = [unit.gathered_buffer.untyped_storage() for unit in optimizer._engine.context.units]
    optimizer.offload_states(non_blocking=not blocking)
    assert not any(unit.allocated for unit in optimizer._engine.context.units)
    if blocking:
        assert [storage.nbytes() for storage in seen] == [0] * len(seen)
    optimizer.backward(loss)
    expected[1].backward(loss_of(expected[0], 1))
    assert_equal(state(model, optimizer), state(*expected))
    for each in (optimizer, expected[1]):
        each.close()


def test_units_that_are_kept_gathered_are_given_up(tmp_path: Path) -> None:
    """Persistent units, before and after an update, and the root between forward and backward."""
    model, optimizer = prepared(separate(), tmp_path, params="cpu", options={"persistent_bytes": 1 << 20})
    expected = prepared(separate(), tmp_path)
    for seed in range(2):
        train(*expected, seed)
    loss = loss_of(model, 0)
    assert optimizer.locations().bytes(kind="gathered") > 0
    optimizer.offload_states({"param"}, "nvme")
    assert optimizer.locations().bytes(kind="gathered") == 0
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.locations().bytes(kind="gathered") > 0
    optimizer.offload_states({"param"}, "cpu")
    assert optimizer.locations().bytes(kind="gathered") == 0
    train(model, optimizer, 1)
    assert_equal(state(model, optimizer), state(*expected))
    for each in (optimizer, expected[1]):
        each.close()


def test_the_root_that_waits_for_backward_is_given_up(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), tmp_path, params="cpu")
    loss = loss_of(model)
    assert optimizer.locations().bytes(kind="gathered") > 0
    optimizer.offload_states({"param"}, "nvme")
    assert optimizer.locations().bytes(kind="gathered") == 0
    optimizer.backward(loss)
    optimizer.close()


def test_a_persistent_unit_comes_home_from_after_its_update(tmp_path: Path) -> None:
    """Its full buffer is kept, and is from before the update, when it becomes the home of the parameters."""
    model, optimizer = prepared(separate(), tmp_path, options={"persistent_bytes": 1 << 20})
    train(model, optimizer)
    optimizer.offload_states({"param"})
    train(model, optimizer)
    before = state(model, optimizer)
    optimizer.reload_states()
    assert_equal(state(model, optimizer), before)
    optimizer.close()


def test_staging_is_bounded_and_given_back(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), tmp_path, params="cpu", optimizer="cpu")
    train(model, optimizer)
    staging = optimizer.locations().bytes(kind="staging")
    assert 0 < staging < 40 * 4096 * 8
    optimizer.offload_states(to="nvme")
    assert optimizer.locations().bytes(kind="staging") == 0
    assert allocations(optimizer) == [], "no buffer stays mapped"
    optimizer.reload_states()
    train(model, optimizer)
    assert optimizer.locations().bytes(kind="staging") == staging
    optimizer.close()


def test_a_split_home_that_went_through_another_tier_takes_no_more_than_before(tmp_path: Path) -> None:
    """What a reload leaves must not share a slab or a file with what stays."""
    thirds = {"device": 0.3, "cpu": 0.3, "nvme": 0.4}
    model, optimizer = prepared(separate(), tmp_path, optimizer=thirds)
    train(model, optimizer)
    mapped, in_files = sum(arena.capacity for arena in allocations(optimizer)), file_bytes(tmp_path)
    for ways in (("nvme", "cpu"), ("cpu", "nvme")):
        for to in ways:
            optimizer.offload_states({"optimizer", "master"}, to)
            assert_table_agrees(optimizer, tmp_path)
        optimizer.reload_states()
        assert_table_agrees(optimizer, tmp_path)
        assert sum(arena.capacity for arena in allocations(optimizer)) == mapped
        assert file_bytes(tmp_path) == in_files
    optimizer.close()


def test_the_shadow_goes_with_the_master_that_it_is(tmp_path: Path) -> None:
    """In fp32 there is no other."""
    model, optimizer = prepared(separate(), tmp_path, params="cpu", precision="fp32")
    train(model, optimizer)
    before = state(model, optimizer)
    assert optimizer.locations().bytes(kind="master", tier="device") > 0
    optimizer.offload_states({"master"})
    optimizer.locations().assert_on("master", "cpu")
    assert_equal(state(model, optimizer), before)
    optimizer.reload_states()
    assert optimizer.locations().bytes(kind="master", tier="device") > 0
    assert_equal(state(model, optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_close_gives_everything_back_wherever_it_is(make: Callable[[], Streams], tmp_path: Path) -> None:
    def all_of_it() -> None:
        for to, last in product(("cpu", "nvme"), (False, True)):
            model, optimizer = prepared(make(), tmp_path)
            train(model, optimizer)
            optimizer.offload_states(to=to)
            train(model, optimizer)
            optimizer.reload_states(non_blocking=True)
            optimizer.offload_states({"optimizer"}, to, non_blocking=last)
            optimizer.close()
            assert torch.isfinite(next(model.parameters())).all()

    all_of_it()
    gc.collect()
    threads, descriptors, held = threading.active_count(), len(os.listdir("/proc/self/fd")), tensor_bytes()
    all_of_it()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert tensor_bytes() == held
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_its_way_out_is_in_the_table_until_it_is_gone(tmp_path: Path) -> None:
    streams = simulated(most_seconds=0.05)
    _, optimizer = prepared(streams, tmp_path)
    moved = optimizer.locations().bytes(kind="optimizer")
    optimizer.offload_states({"optimizer"}, non_blocking=True)
    report = optimizer.locations()
    report.assert_on("optimizer", "cpu")
    assert report.bytes(kind="leaving", tier="device") == moved
    assert any(row.in_flight for row in report.rows if row.kind == "exp_avg")
    assert not any(row.in_flight for row in report.rows if row.kind == "grad")
    optimizer.synchronize()
    optimizer._engine.offloader._cleaned.synchronize()
    assert optimizer.locations().bytes(kind="leaving") == 0
    assert_table_agrees(optimizer)
    optimizer.close()


# Where a move may be made


def _quietly(move: Callable[[], Any]) -> None:
    """A hook that gives nothing back changes nothing."""
    move()


Place = Callable[[Net, Callable[[], None]], Any]


@contextmanager
def forward_pre_hook(model: Net, move: Callable[[], None]) -> Iterator[None]:
    with model.blocks[1].second.register_forward_pre_hook(lambda *_: _quietly(move)):
        yield


@contextmanager
def forward_hook(model: Net, move: Callable[[], None]) -> Iterator[None]:
    with model.blocks[0].register_forward_hook(lambda *_: _quietly(move)):
        yield


@contextmanager
def backward_hook(model: Net, move: Callable[[], None]) -> Iterator[None]:
    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: _quietly(move))

    with model.blocks[1].first.register_forward_hook(watch):
        yield


@contextmanager
def gradient_hook(model: Net, move: Callable[[], None]) -> Iterator[None]:
    with model.blocks[1].first.weight.register_post_accumulate_grad_hook(lambda _: _quietly(move)):
        yield


def plain(model: Net) -> None:
    pass


def checkpointed(model: Net) -> None:
    for block in model.blocks:
        block.checkpointed = True


def opaque(model: Net) -> None:
    model.blocks[1].opaque = True


INSIDE = {
    "make": tuple(BACK_ENDS),
    "place": (forward_pre_hook, forward_hook, backward_hook, gradient_hook),
    "variant": (plain, checkpointed, opaque),
}


@pytest.mark.parametrize(("make", "place", "variant"), [tuple(row.values()) for row in covering(INSIDE)])
def test_moves_inside_forward_and_backward(
    make: Callable[[], Streams], place: Place, variant: Callable[[Net], None], tmp_path: Path
) -> None:
    expected = prepared(inline(), tmp_path)
    variant(expected[0])
    losses = [train(*expected, seed) for seed in range(4)]
    moves = [
        lambda o, wait: o.offload_states(non_blocking=not wait),
        lambda o, wait: o.offload_states({"param"}, "nvme", non_blocking=not wait),
        lambda o, wait: (o.locations().to_dict(), o.reload_states(non_blocking=not wait)),
        lambda o, wait: (o.reload_states(), o.offload_states({"grad", "param"}, non_blocking=not wait)),
    ]
    on_cpu = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
    for storages, blocking in (({}, True), ({}, False), (on_cpu, False), ({"params": "nvme"}, True)):
        model, optimizer = prepared(make(), tmp_path, **storages)
        variant(model)
        for seed, move in enumerate(moves):
            with place(model, lambda m=move, o=optimizer, b=blocking: m(o, b)):
                assert train(model, optimizer, seed) == losses[seed]
        assert_equal(state(model, optimizer), state(*expected))
        optimizer.close()
    expected[1].close()


GATHERED = {"make": tuple(BACK_ENDS), "precision": ("fp32", "bf16"), "fails": (False, True)}


@pytest.mark.parametrize(("make", "precision", "fails"), [tuple(row.values()) for row in covering(GATHERED)])
def test_moves_while_parameters_are_gathered(
    make: Callable[[], Streams], precision: str, fails: bool, tmp_path: Path
) -> None:
    expected = prepared(inline(), tmp_path, precision=precision)
    train(*expected)
    if not fails:
        with expected[1].gathered(modify=True), torch.no_grad():
            expected[0].embed.weight.add_(1)
            expected[0].blocks[1].second.weight.mul_(2)
    for first, second in product((None, "cpu", "nvme"), repeat=2):
        model, optimizer = prepared(make(), tmp_path, precision=precision)
        train(model, optimizer)

        def move(to: str | None, optimizer: penstock.Optimizer = optimizer) -> None:
            if to is None:
                optimizer.reload_states(non_blocking=True)
            else:
                optimizer.offload_states(to=to, non_blocking=True)

        move(first)
        with (
            pytest.raises(KeyError) if fails else optimizer.gathered(),
            optimizer.gathered(modify=True),
            torch.no_grad(),
        ):
            model.embed.weight.add_(1)
            move(second)
            model.blocks[1].second.weight.mul_(2)
            if fails:
                raise KeyError
        assert_equal(state(model, optimizer), state(*expected))
        assert train(model, optimizer, 5) == loss_of(expected[0], 5)
        optimizer.close()
    expected[1].close()


def test_what_a_block_wrote_that_failed_is_in_no_shadow_that_a_move_inside_has_made() -> None:
    """Of parameters on the device and state on the cpu: the next update would have started from it."""
    expected, model = prepared(inline()), prepared(separate(), optimizer="cpu")
    for net, optimizer in (expected, model):
        train(net, optimizer)
        with contextlib.suppress(KeyError), optimizer.gathered(modify=True), torch.no_grad():
            net.embed.weight.add_(1)
            optimizer.offload_states()
            optimizer.reload_states()
            raise KeyError
        train(net, optimizer, 5)
    assert_equal(state(*model), state(*expected))
    for _, optimizer in (expected, model):
        optimizer.close()


def test_a_parameter_that_may_be_written_where_it_rests_may_still_have_been_after_a_move() -> None:
    """In fp32 there is no master to disagree with."""
    model, optimizer = prepared(separate(), precision="fp32")
    with torch.no_grad():
        model.embed.weight.mul_(2)
    optimizer.offload_states({"param"})
    train(model, optimizer)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.embed.weight.mul_(2)
    optimizer.close()


def test_reload_and_offload_of_what_is_there_do_nothing(tmp_path: Path) -> None:
    model, optimizer = prepared(separate(), tmp_path, params="cpu")
    train(model, optimizer)
    before = optimizer.locations().to_dict()
    optimizer.reload_states()
    optimizer.offload_states(set())
    optimizer.offload_states({"param"})
    assert optimizer.locations().to_dict() == before
    optimizer.close()


def test_schedulers_and_state_dicts_do_not_notice(tmp_path: Path) -> None:
    def run(moves: bool) -> list[Tensor]:
        model, optimizer = prepared(separate(), tmp_path)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            train(model, optimizer, seed)
            scheduler.step()
            if moves:
                optimizer.offload_states(to="cpu" if seed else "nvme", non_blocking=True)
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.set_full_param(model.embed.weight, optimizer.full_param(model.embed.weight) + 1)
            optimizer.set_full_state(model.embed.bias, "exp_avg", torch.ones(WIDTH))
            optimizer.set_full_grad(model.embed.bias, torch.ones(WIDTH))
        optimizer.step()
        values = state(model, optimizer)
        optimizer.close()
        return values

    assert_equal(run(True), run(False))


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (({"weights"},), ConfigError, "include names 'weights'. Use some of 'param', 'grad', 'master', 'optimizer'."),
        ((None, "device"), ConfigError, "use 'cpu' or 'nvme'"),
        ((None, "tape"), ConfigError, "to='tape' is not a tier"),
        ((None, "nvme"), ConfigError, "The nvme tier has no folder for its files"),
    ],
)
def test_a_wrong_request_changes_nothing(arguments: Any, error: type[Exception], text: str) -> None:
    model, optimizer = prepared(separate())
    train(model, optimizer)
    backward(model, optimizer)
    before, table = state(model, optimizer), optimizer.locations().to_dict()
    with pytest.raises(error) as caught:
        optimizer.offload_states(*arguments)
    assert text in str(caught.value)
    assert optimizer.locations().to_dict() == table
    assert_equal(state(model, optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_a_host_that_is_full_changes_nothing(
    make: Callable[[], Streams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(make(), tmp_path)
    train(model, optimizer)
    before, table = state(model, optimizer), optimizer.locations().to_dict()
    optimizer.offload_states({"optimizer"}, "nvme")
    for arguments in ((None, "cpu"), ({"param"}, "nvme")):  # the second one's ring does not fit
        with monkeypatch.context() as patch:
            patch.setattr(
                "penstock.runtime.host_memory.available_host_memory", lambda: HostMemory(1000, "the host has")
            )
            with pytest.raises(MemoryBudgetError, match="bytes of host memory are needed"):
                optimizer.offload_states(*arguments)
        optimizer.locations().assert_on("optimizer", "nvme")
        optimizer.locations().assert_on("param", "device")
        assert_table_agrees(optimizer, tmp_path)
    optimizer.reload_states()
    assert {k: v for k, v in optimizer.locations().to_dict()["bytes"].items() if k != "staging"} == {
        k: v for k, v in table["bytes"].items() if k != "staging"
    }
    assert_equal(state(model, optimizer), before)
    train(model, optimizer)
    optimizer.close()


def test_a_device_that_is_full_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(separate())
    train(model, optimizer)
    before = state(model, optimizer)
    optimizer.offload_states()
    makes = torch.empty

    def refuse(*shape: Any, **rest: Any) -> Tensor:
        if isinstance(shape[0], int) and shape[0] > 9000:
            raise torch.OutOfMemoryError("the device is full")
        return makes(*shape, **rest)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.tiers.host.torch.empty", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.reload_states()
    for kind in KINDS:
        optimizer.locations().assert_on(kind, "cpu")
    assert_table_agrees(optimizer)
    units = optimizer._engine.context.units
    assert not any(unit.resident or unit.gathered_buffer.untyped_storage().nbytes() for unit in units)
    assert_equal(state(model, optimizer), before)
    optimizer.reload_states()
    assert_equal(state(model, optimizer), before)
    optimizer.close()


FAILURES = {"make": tuple(BACK_ENDS), "offloads": (True, False), "when": ("submission", "completion")}


@pytest.mark.parametrize(("make", "offloads", "when"), [tuple(row.values()) for row in covering(FAILURES)])
def test_a_transfer_that_fails_leaves_everything_where_it_was(
    make: Callable[[], Streams], offloads: bool, when: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    expected = prepared(inline(), tmp_path / "..")
    train(*expected)
    model, optimizer = prepared(make(), tmp_path)
    train(model, optimizer)
    for failing in (1, 4, 9):
        if not offloads:
            optimizer.offload_states(to="nvme")
        faults.arm(failing, when)
        with pytest.raises(NvmeError):
            optimizer.offload_states(to="nvme") if offloads else optimizer.reload_states()
        faults.arm(0)
        for kind in KINDS:
            optimizer.locations().assert_on(kind, "device" if offloads else "nvme")
        assert_table_agrees(optimizer, tmp_path)
        assert train(model, optimizer, failing) == train(*expected, failing)
        assert_equal(state(model, optimizer), state(*expected))
        optimizer.reload_states()
    for each in (optimizer, expected[1]):
        each.close()


def reload_and(use: Callable[..., Any], model: Net, optimizer: penstock.Optimizer) -> None:
    """The first of them that can know raises the error."""
    optimizer.reload_states(non_blocking=True)
    use(model, optimizer)


@pytest.mark.parametrize("make", BACK_ENDS)
def test_a_transfer_that_fails_in_flight_is_raised_at_the_next_use_at_the_latest(
    make: Callable[[], Streams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    for use in (train, state, lambda m, o: o.reload_states(), lambda m, o: o.close()):
        threads = threading.active_count()
        model, optimizer = prepared(make(), tmp_path)
        train(model, optimizer)
        optimizer.offload_states(to="nvme")
        faults.arm(2)
        with pytest.raises(NvmeError):
            reload_and(use, model, optimizer)
        if optimizer._engine is not None:
            with pytest.raises(NvmeError):
                optimizer.close()
        assert file_bytes(tmp_path) == 0
        assert threading.active_count() == threads


def test_copies_that_fail_leave_everything_where_it_was() -> None:
    streams = BreakingStreams()
    model, optimizer = prepared(streams)
    train(model, optimizer)
    before = state(model, optimizer)
    streams.broken = "download"
    with pytest.raises(BrokenError):
        optimizer.offload_states()
    streams.broken = None
    assert_table_agrees(optimizer)
    assert_equal(state(model, optimizer), before)
    train(model, optimizer)
    optimizer.close()


# Ranks


def check_rank(rank: int, stage: int, back_ends: list[Callable[[], Streams]], folder: str) -> list[str]:
    """At one stage: micro-batches held back, a replica that becomes shards and a replica again, failures."""
    failures = []
    for make in back_ends:
        expected = prepared(inline(), Path(folder), stage=stage)
        model, optimizer = prepared(make(), Path(folder), stage=stage)
        moves = (
            lambda o: o.offload_states(to="nvme"),
            lambda o: o.offload_states(to="cpu", non_blocking=True),
            lambda o: o.offload_states({"param"}, to="nvme"),
            lambda o: o.reload_states(non_blocking=True),
        )
        for seed, move in enumerate(moves):
            for each, moves_now in ((expected, False), ((model, optimizer), True)):
                with each[1].no_sync():
                    backward(*each, 2 * seed + rank)
                if moves_now:
                    move(optimizer)
                backward(*each, 2 * seed + rank + 1)
                each[1].step()
                each[1].zero_grad()
            for ours, theirs in zip(state(model, optimizer), state(*expected), strict=True):
                if not torch.equal(ours, theirs):
                    failures.append(f"{make.__name__} after move {seed}")
                    break
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(
                    "penstock.runtime.host_memory.available_host_memory", lambda: HostMemory(1000, "the host has")
                )
            with pytest.raises(MemoryBudgetError if rank == 1 else EngineError):
                optimizer.offload_states()  # one rank cannot, so none does
        optimizer.locations().assert_on("param", "device")
        train(model, optimizer)
        optimizer.close()
        expected[1].close()
    return failures


@pytest.mark.parametrize(
    ("stage", "back_ends"),
    [(3, BACK_ENDS), (1, BACK_ENDS[2:])],
    ids=["stage 3", "late, stage 1"],
)
def test_moves_on_two_ranks(stage: int, back_ends: list[Callable[[], Streams]], tmp_path: Path) -> None:
    assert run_ranks(check_rank, 2, stage, back_ends, str(tmp_path)) == [[], []]


def test_engines_take_turns_on_one_device(tmp_path: Path) -> None:
    """While one trains, the other holds nothing on the device."""
    both = [prepared(separate(), tmp_path), prepared(separate(), tmp_path)]
    alone = prepared(separate(), tmp_path)
    both[1][1].offload_states(to="nvme")
    for seed in range(3):
        for turn in (0, 1):
            model, optimizer = both[turn]
            other = both[1 - turn][1]
            other.offload_states(to="cpu" if seed else "nvme")
            optimizer.reload_states()
            train(model, optimizer, seed)
            assert other.locations().bytes(tier="device") == 0
        train(*alone, seed)
    for model, optimizer in both:
        assert_equal(state(model, optimizer), state(*alone))
        optimizer.close()
    alone[1].close()


def test_updates_behind_a_move_that_is_not_waited_for_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clean-up of the move waited for reads from its ring, and those for updates behind the clean-up."""
    shorten_rings(monkeypatch)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    slow_updates = SimulatedStreams(lambda stream, nbytes: 0.05 if stream == UPDATE else 0.0)
    placement = penstock.Placement(grads="cpu", optimizer="cpu", nvme_path=tmp_path)
    options = penstock.Options(tile_bytes=4096)
    optimizer = prepare_on(slow_updates, model, stock, placement=placement, overlap="forward", options=options)
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 96)).float().square().mean())
        optimizer.offload_states({"optimizer", "master"}, "nvme", non_blocking=True)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.reload_states(non_blocking=True)
    optimizer.close()
