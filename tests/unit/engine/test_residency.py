"""Moves at will: values, the table, memory and files, at every place where a move may be made."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import EngineError, MemoryBudgetError, NvmeError
from penstock.runtime.host_memory import Arena, HostMemory
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, Streams
from tests.accounts import allocations, assert_table_agrees, file_bytes, swap_files, tensor_bytes
from tests.faults.failing_files import Faults
from tests.lib.covering import covering, named
from tests.lib.engines import assert_same_state, loss_of, prepared, state, train
from tests.lib.memory import disks, shorten_rings
from tests.lib.models import Blocks, opaque_blocks, stack
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused_unchanged, rows
from tests.lib.streams import BreakingStreams, BrokenError, GatedStreams, inline, late, separate, simulated

WIDTH = 32
KINDS = ("param", "grad", "master", "optimizer")
TIERS = ("device", "cpu", "nvme")


BACK_ENDS = (inline, separate, late)


def net(*, opaque: bool = False) -> Blocks:
    """Blocks, one of which is half frozen."""
    model = opaque_blocks(WIDTH) if opaque else Blocks(2, WIDTH)
    model.blocks[1].down.requires_grad_(False)
    return model


def moving(
    streams: Any = separate, folder: Path | None = None, model: nn.Module | None = None, **how: Any
) -> tuple[Any, penstock.Optimizer]:
    return prepared(model or net(), streams, **{"precision": "bf16", "nvme_path": folder, **how})


def backward(model: nn.Module, optimizer: penstock.Optimizer, seed: int = 0) -> None:
    optimizer.backward(loss_of(model, seed))


# Values, the table, memory


@pytest.mark.parametrize("row", covering({"make": BACK_ENDS, "storage": TIERS, "blocking": (True, False)}), ids=named)
def test_every_kind_goes_there_and_back(row: dict[str, Any], tmp_path: Path) -> None:
    storage, blocking = row["storage"], row["blocking"]
    model, optimizer = moving(row["make"], tmp_path, params=storage, grads=storage, optimizer=storage)
    train(model, optimizer)
    backward(model, optimizer, 1)

    def lasting() -> dict[str, Any]:
        found = optimizer.locations().to_dict()["bytes"]
        return {kind: nbytes for kind, nbytes in found.items() if kind not in ("staging", "gathered")}

    before, there = state(model, optimizer), lasting()
    for to, kinds in (("nvme", {"param", "optimizer"}), ("cpu", {"grad", "master"}), ("nvme", None)):
        optimizer.offload_states(kinds, to, non_blocking=not blocking)
        if blocking:
            assert_table_agrees(optimizer, tmp_path)
        report = optimizer.locations()
        for other in KINDS:
            report.assert_on(other, to if other in (kinds or KINDS) else storage)
        assert_same_state(state(model, optimizer), before)
        optimizer.reload_states(non_blocking=not blocking)
        assert_same_state(state(model, optimizer), before)
        optimizer._engine.offloader._cleaned.synchronize()
        assert_table_agrees(optimizer, tmp_path)
        assert {kind: nbytes for kind, nbytes in lasting().items() if kind in there} == there
    optimizer.step()
    optimizer.close()
    assert file_bytes(tmp_path) == 0


@pytest.mark.parametrize(("storage", "to"), [("device", "nvme"), ("cpu", "cpu")])
def test_device_memory_falls_to_what_is_left(storage: str, to: str, tmp_path: Path) -> None:
    """Every tensor that Python sees, the cpu tier's slabs aside: nothing keeps a copy, or a buffer of gradients."""
    bare = tensor_bytes()
    model, optimizer = moving(separate, tmp_path, params=storage, grads=storage, optimizer="device")
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


@pytest.mark.parametrize("blocking", [True, False])
def test_what_autograd_saved_holds_no_copy(blocking: bool) -> None:
    """Between forward and backward: the graph holds views of weights, whose storage is empty until backward."""
    model, optimizer = moving()
    expected = moving()
    train(model, optimizer)
    train(*expected)
    loss = loss_of(model, 1)
    seen = [unit.gathered_buffer.untyped_storage() for unit in optimizer._engine.context.units]
    optimizer.offload_states(non_blocking=not blocking)
    assert not any(unit.allocated for unit in optimizer._engine.context.units)
    if blocking:
        assert [storage.nbytes() for storage in seen] == [0] * len(seen)
    optimizer.backward(loss)
    backward(*expected, 1)
    assert_same_state(state(model, optimizer), state(*expected))


@pytest.mark.parametrize("persistent", [True, False])
def test_units_that_are_kept_gathered_are_given_up(persistent: bool, tmp_path: Path) -> None:
    """The root between forward and backward; persistent units also before and after an update."""
    model, optimizer = moving(separate, tmp_path, params="cpu", persistent_bytes=1 << 20 if persistent else 0)
    expected = moving(separate, tmp_path)
    train(*expected, 2)
    loss = loss_of(model, 0)
    assert optimizer.locations().bytes(kind="gathered") > 0
    optimizer.offload_states({"param"}, "nvme")
    assert optimizer.locations().bytes(kind="gathered") == 0
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.locations().bytes(kind="gathered") > 0) == persistent
    optimizer.offload_states({"param"}, "cpu")
    assert optimizer.locations().bytes(kind="gathered") == 0
    train(model, optimizer, first=1)
    assert_same_state(state(model, optimizer), state(*expected))


def test_a_persistent_unit_comes_home_from_after_its_update() -> None:
    """Its full buffer is kept, and is from before the update, when it becomes the home of the parameters."""
    model, optimizer = moving(persistent_bytes=1 << 20)
    train(model, optimizer)
    optimizer.offload_states({"param"})
    train(model, optimizer)
    before = state(model, optimizer)
    optimizer.reload_states()
    assert_same_state(state(model, optimizer), before)


def test_staging_is_bounded_and_given_back(tmp_path: Path) -> None:
    model, optimizer = moving(separate, tmp_path, params="cpu", optimizer="cpu")
    train(model, optimizer)
    staging = optimizer.locations().bytes(kind="staging")
    assert 0 < staging < 40 * 4096 * 8
    optimizer.offload_states(to="nvme")
    assert optimizer.locations().bytes(kind="staging") == 0
    assert allocations(optimizer) == [], "no buffer stays mapped"
    optimizer.reload_states()
    train(model, optimizer)
    assert optimizer.locations().bytes(kind="staging") == staging


def test_a_split_home_that_went_through_another_tier_takes_no_more_than_before(tmp_path: Path) -> None:
    """What a reload leaves must not share a slab or a file with what stays."""
    model, optimizer = moving(separate, tmp_path, optimizer={"device": 0.3, "cpu": 0.3, "nvme": 0.4})
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


def test_the_shadow_goes_with_the_master_that_it_is() -> None:
    """In fp32 there is no other."""
    model, optimizer = moving(params="cpu", precision="fp32")
    train(model, optimizer)
    before = state(model, optimizer)
    assert optimizer.locations().bytes(kind="master", tier="device") > 0
    optimizer.offload_states({"master"})
    optimizer.locations().assert_on("master", "cpu")
    assert_same_state(state(model, optimizer), before)
    optimizer.reload_states()
    assert optimizer.locations().bytes(kind="master", tier="device") > 0
    assert_same_state(state(model, optimizer), before)


@pytest.mark.parametrize("make", [inline, late])
def test_close_gives_everything_back_wherever_it_is(make: Callable[[], Streams], tmp_path: Path) -> None:
    def all_of_it() -> None:
        for to, last in (("cpu", True), ("nvme", False), ("nvme", True)):
            model, optimizer = moving(make, tmp_path)
            train(model, optimizer)
            optimizer.offload_states(to=to)
            train(model, optimizer)
            optimizer.reload_states(non_blocking=True)
            optimizer.offload_states({"optimizer"}, to, keep=True, non_blocking=last)
            optimizer.reload_states()
            optimizer.offload_states({"grad"}, to, keep=True)
            assert optimizer.locations().bytes(kind="kept", tier=to) > 0
            optimizer.close()
            assert torch.isfinite(next(model.parameters())).all()

    all_of_it()
    gc.collect()
    threads, descriptors, held = threading.active_count(), len(os.listdir("/proc/self/fd")), tensor_bytes()
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    all_of_it()
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 20
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert tensor_bytes() == held
    assert list(tmp_path.iterdir()) == []


def test_what_is_on_its_way_out_is_in_the_table_until_it_is_gone() -> None:
    streams = GatedStreams(DOWNLOAD)
    _, optimizer = moving(streams)
    moved = optimizer.locations().bytes(kind="optimizer")
    optimizer.offload_states({"optimizer"}, non_blocking=True)
    report = optimizer.locations()
    report.assert_on("optimizer", "cpu")
    assert report.bytes(kind="leaving", tier="device") == moved
    assert any(row.in_flight for row in report.rows if row.kind == "exp_avg")
    assert not any(row.in_flight for row in report.rows if row.kind == "grad")
    streams.let_through.release(1000)
    optimizer.synchronize()
    optimizer._engine.offloader._cleaned.synchronize()
    assert optimizer.locations().bytes(kind="leaving") == 0
    assert_table_agrees(optimizer)


# Where a move may be made


@pytest.mark.parametrize("make", BACK_ENDS)
def test_what_stays_gathered_until_backward_moves_before_it(make: Callable[[], Streams]) -> None:
    """Of a block whose output cannot be looked into. `tests/property` moves others inside forward and backward."""
    expected, model = moving(inline, model=net(opaque=True)), moving(make, model=net(opaque=True), nvme_path=disks())
    for seed, to in enumerate(("cpu", "nvme")):
        for each, optimizer in (expected, model):
            loss = loss_of(each, seed)
            if optimizer is model[1]:
                optimizer.offload_states(to=to, non_blocking=to == "cpu")
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(state(*model), state(*expected))


GATHERED = {
    "make": BACK_ENDS,
    "precision": ("fp32", "bf16"),
    "before": (None, "cpu"),
    "inside": (None, "cpu", "nvme"),
}


@pytest.mark.parametrize("row", covering(GATHERED), ids=named)
def test_moves_while_parameters_are_gathered(row: dict[str, Any], tmp_path: Path) -> None:
    expected, other = moving(inline, tmp_path, precision=row["precision"])
    model, optimizer = moving(row["make"], tmp_path, precision=row["precision"])
    for each in ((expected, other), (model, optimizer)):
        train(*each)
    with other.gathered(modify=True), torch.no_grad():
        expected.first.weight.add_(1)
        expected.blocks[1].down.weight.mul_(2)

    def move(to: str | None) -> None:
        if to is None:
            optimizer.reload_states(non_blocking=True)
        else:
            optimizer.offload_states(to=to, non_blocking=True)

    move(row["before"])
    with optimizer.gathered(), optimizer.gathered(modify=True), torch.no_grad():
        model.first.weight.add_(1)
        move(row["inside"])
        model.blocks[1].down.weight.mul_(2)
    assert_same_state(state(model, optimizer), state(expected, other))
    assert train(model, optimizer, first=5) == train(expected, other, first=5)


def test_what_a_block_wrote_that_failed_is_in_no_shadow_that_a_move_inside_has_made() -> None:
    """Of parameters on the device and state on the cpu: the next update would have started from it."""
    expected, model = moving(inline), moving(optimizer="cpu")
    for net, optimizer in (expected, model):
        train(net, optimizer)
        with contextlib.suppress(KeyError), optimizer.gathered(modify=True), torch.no_grad():
            net.first.weight.add_(1)
            optimizer.offload_states()
            optimizer.reload_states()
            raise KeyError
        train(net, optimizer, first=5)
    assert_same_state(state(*model), state(*expected))


def test_a_parameter_that_may_be_written_where_it_rests_may_still_have_been_after_a_move() -> None:
    """In fp32 there is no master to disagree with."""
    model, optimizer = moving(precision="fp32")
    with torch.no_grad():
        model.first.weight.mul_(2)
    optimizer.offload_states({"param"})
    train(model, optimizer)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.first.weight.mul_(2)


def test_reload_and_offload_of_what_is_there_do_nothing() -> None:
    model, optimizer = moving(params="cpu")
    train(model, optimizer)
    before = optimizer.locations().to_dict()
    optimizer.reload_states()
    optimizer.offload_states(set())
    optimizer.offload_states({"param"})
    assert optimizer.locations().to_dict() == before


# Errors


def offload_to_a_full_host(model: nn.Module, optimizer: penstock.Optimizer, *arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        few = HostMemory(1000, "the host has")
        patch.setattr("penstock.runtime.host_memory.available_host_memory", lambda: few)
        optimizer.offload_states(*arguments)


REFUSED = {
    "kind": Refusal(
        lambda _, o: o.offload_states({"weights"}),
        "include names 'weights'. Use some of 'param', 'grad', 'master', 'optimizer'.",
    ),
    "device": Refusal(lambda _, o: o.offload_states(to="device"), "use 'cpu' or 'nvme'"),
    "tier": Refusal(lambda _, o: o.offload_states(to="tape"), "to='tape' is not a tier"),
    "folder": Refusal(lambda _, o: o.offload_states(to="nvme"), "The nvme tier has no folder for its files"),
    "host": Refusal(offload_to_a_full_host, "bytes of host memory are needed", MemoryBudgetError),
    "host, late": Refusal(
        offload_to_a_full_host, "bytes of host memory are needed", MemoryBudgetError, {"streams": late}
    ),
    "host, for a ring": Refusal(
        lambda model, optimizer: offload_to_a_full_host(model, optimizer, {"param"}, "nvme"),
        "bytes of host memory are needed",
        MemoryBudgetError,
        {"nvme_path": disks()},
    ),
}


@rows(REFUSED)
def test_a_request_that_cannot_be_met_changes_nothing(row: Refusal) -> None:
    refused_unchanged(row, model=net, precision="bf16")


def test_a_device_that_is_full_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = moving()
    train(model, optimizer)
    before = state(model, optimizer)
    optimizer.offload_states()
    makes = torch.empty

    def refuse(*shape: Any, **rest: Any) -> Tensor:
        if isinstance(shape[0], int) and shape[0] > 4000:
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
    assert_same_state(state(model, optimizer), before)
    optimizer.reload_states()
    assert_same_state(state(model, optimizer), before)


FAILURES = {"make": BACK_ENDS, "offloads": (True, False), "when": ("submission", "completion"), "failing": (1, 9)}


@pytest.mark.parametrize("row", covering(FAILURES), ids=named)
def test_a_transfer_that_fails_leaves_everything_where_it_was(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    expected = moving(inline)
    model, optimizer = moving(row["make"], tmp_path)
    for each in (expected, (model, optimizer)):
        train(*each)
    if not row["offloads"]:
        optimizer.offload_states(to="nvme")
    faults.arm(row["failing"], row["when"])
    with pytest.raises(NvmeError):
        optimizer.offload_states(to="nvme") if row["offloads"] else optimizer.reload_states()
    faults.arm(0)
    for kind in KINDS:
        optimizer.locations().assert_on(kind, "device" if row["offloads"] else "nvme")
    assert_table_agrees(optimizer, tmp_path)
    assert train(model, optimizer, first=1) == train(*expected, first=1)
    assert_same_state(state(model, optimizer), state(*expected))
    optimizer.reload_states()


USES: dict[str, Callable[[nn.Module, penstock.Optimizer], Any]] = {
    "train": train,
    "look": state,
    "move": lambda model, optimizer: optimizer.reload_states(),
    "close": lambda model, optimizer: optimizer.close(),
}


@pytest.mark.parametrize(("use", "make"), list(zip(USES, (separate, late) * 2, strict=True)))
def test_a_transfer_that_fails_in_flight_is_raised_at_the_next_use_at_the_latest(
    use: str, make: Callable[[], Streams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    faults.install(monkeypatch)
    threads = threading.active_count()
    model, optimizer = moving(make, tmp_path)
    train(model, optimizer)
    optimizer.offload_states(to="nvme")
    faults.arm(2)

    def reload_and_use() -> None:
        """The first of them that can know raises the error."""
        optimizer.reload_states(non_blocking=True)
        USES[use](model, optimizer)

    with pytest.raises(NvmeError):
        reload_and_use()
    if optimizer._engine is not None:
        with pytest.raises(NvmeError):
            optimizer.close()
    assert file_bytes(tmp_path) == 0
    assert threading.active_count() == threads


def test_copies_that_fail_leave_everything_where_it_was() -> None:
    streams = BreakingStreams()
    model, optimizer = moving(streams)
    train(model, optimizer)
    before = state(model, optimizer)
    streams.broken = DOWNLOAD
    with pytest.raises(BrokenError):
        optimizer.offload_states()
    streams.broken = None
    assert_table_agrees(optimizer)
    assert_same_state(state(model, optimizer), before)
    train(model, optimizer)


# Several ranks, several engines


def check_full_host_of_a_rank(rank: int) -> None:
    """One rank cannot, so none does."""
    model, optimizer = moving(late, stage=3)
    train(model, optimizer)
    before = state(model, optimizer)
    with pytest.raises(MemoryBudgetError if rank == 1 else EngineError):
        offload_to_a_full_host(model, optimizer) if rank == 1 else optimizer.offload_states()
    optimizer.locations().assert_on("param", "device")
    assert_same_state(state(model, optimizer), before)
    train(model, optimizer)
    optimizer.close()


def test_what_a_rank_has_no_memory_for_no_rank_moves() -> None:
    run_ranks(check_full_host_of_a_rank, 2)


def test_updates_behind_a_move_that_is_not_waited_for_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clean-up of the move waited for reads from its ring, and those for updates behind the clean-up."""
    shorten_rings(monkeypatch)
    slow_updates = SimulatedStreams(lambda stream, nbytes: 0.01 if stream == UPDATE else 0.0)
    model, optimizer = moving(slow_updates, tmp_path, stack(width=96), grads="cpu", optimizer="cpu", overlap="forward")
    for _ in range(2):
        backward(model, optimizer)
        optimizer.offload_states({"optimizer", "master"}, "nvme", non_blocking=True)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.reload_states(non_blocking=True)


# Moves that keep their memory and files for the next one


def host_addresses(optimizer: penstock.Optimizer) -> set[int]:
    return {arena._allocation.data_ptr() for arena in allocations(optimizer) if arena._allocation is not None}


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in swap_files(folder)}


@pytest.mark.parametrize(("to", "non_blocking"), [("cpu", False), ("cpu", True), ("nvme", True)])
def test_the_next_move_takes_what_the_last_one_kept(to: str, non_blocking: bool, tmp_path: Path) -> None:
    model, optimizer = moving(simulated if non_blocking else separate, tmp_path, stack(8, 64, 64, 8))
    plain = moving(separate, tmp_path, stack(8, 64, 64, 8))
    seen = []
    for seed in range(3):
        train(model, optimizer, first=seed)
        train(*plain, first=seed)
        moved = optimizer.locations().bytes(tier="device") - optimizer.locations().bytes(kind="gathered")
        optimizer.offload_states(to=to, keep=True, non_blocking=non_blocking)
        optimizer._engine.offloader.finish()
        mine = {path: inode for path, inode in files(tmp_path).items() if to == "nvme"}
        seen.append(mine or host_addresses(optimizer))
        assert optimizer.locations().bytes(kind="kept", tier=to) == 0, "it is in use"
        optimizer.reload_states(non_blocking=non_blocking)
        optimizer._engine.offloader.finish()
        assert optimizer.locations().bytes(kind="kept", tier=to) == moved
        assert not any(row.in_flight for row in optimizer.locations().rows if row.kind == "kept")
        assert_table_agrees(optimizer)
    assert seen[0] == seen[1] == seen[2]
    assert_same_state(state(model, optimizer), state(*plain))
    optimizer.close()
    plain[1].close()
    assert file_bytes(tmp_path) == 0


def test_an_offload_without_keep_gives_back_what_was_kept(tmp_path: Path) -> None:
    model, optimizer = moving(separate, tmp_path, stack(8, 64, 64, 8))
    train(model, optimizer)
    for to in ("cpu", "nvme"):
        optimizer.offload_states(to=to, keep=True)
        optimizer.reload_states()
        assert optimizer.locations().bytes(kind="kept", tier=to) > 0
    assert optimizer.locations().bytes(kind="kept", tier="cpu") > 0
    optimizer.offload_states({"optimizer"})
    assert optimizer.locations().bytes(kind="kept") == 0
    optimizer.reload_states()
    assert optimizer.locations().bytes(kind="kept") == 0
    assert_table_agrees(optimizer, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_one_offload_leaves_for_another_is_not_kept(tmp_path: Path) -> None:
    model, optimizer = moving(separate, tmp_path, stack(8, 64, 64, 8))
    train(model, optimizer)
    optimizer.offload_states(keep=True)
    optimizer.offload_states(to="nvme", keep=True)
    assert optimizer.locations().bytes(tier="cpu") == optimizer.locations().bytes(kind="kept", tier="cpu")
    assert all(
        row.kind == "kept" and row.unit.startswith("(") for row in optimizer.locations().rows if row.tier == "cpu"
    )


def test_kept_memory_has_no_values_of_before(tmp_path: Path) -> None:
    """The second time no gradients move: their home is zeros, and not the gradients of the first time."""
    model, optimizer = moving(separate, tmp_path, stack(8, 64, 64, 8))
    plain = moving(separate, tmp_path, stack(8, 64, 64, 8))
    for each in ((model, optimizer), plain):
        each[1].backward(each[0](torch.ones(4, 8)).float().sum())
    optimizer.offload_states(keep=True)
    optimizer.reload_states()
    for each in ((model, optimizer), plain):
        each[1].step()
        each[1].zero_grad()
    optimizer.offload_states(keep=True)
    for name, storage in ((n, h) for unit in optimizer._engine.context.units for n, h in unit.storages.items()):
        if name == "grad":
            assert not any(tensor.any() for segment in storage.segments for tensor in segment.tensors)
    for each in ((model, optimizer), plain):
        train(*each, first=3)
    assert_same_state(state(model, optimizer), state(*plain))


def test_what_is_kept_goes_where_something_else_has_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = moving(separate, tmp_path, stack(8, 64, 64, 8))
    train(model, optimizer)
    optimizer.offload_states({"optimizer"}, keep=True)
    optimizer.reload_states()
    kept = optimizer.locations().bytes(kind="kept")
    before = state(model, optimizer)

    def left() -> HostMemory:
        return HostMemory(0 if optimizer._engine.context.store._kept else 1 << 30, "the host has")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "available", staticmethod(left))
        optimizer.offload_states({"param"}, keep=True)
    assert kept > 0
    assert optimizer.locations().bytes(kind="kept") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "available", staticmethod(lambda: HostMemory(0, "the host has")))
        with pytest.raises(MemoryBudgetError, match="too few"):
            optimizer.offload_states({"optimizer"}, keep=True)
    assert_same_state(state(model, optimizer), before)
