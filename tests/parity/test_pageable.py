"""What of the host's memory is pinned: what a device copies, and nothing that the host alone works on."""

import warnings

import pytest
import torch

import penstock
from penstock.runtime import host_memory
from tests.lib.engines import prepare_on
from tests.lib.memory import disks, pinning_on_cpu
from tests.lib.streams import separate
from tests.parity.rows import Arithmetic, Movement, make_model, prepared, shares

KIB = 1 << 10
pytestmark = pytest.mark.filterwarnings("ignore:.*of the cpu tier are not pinned")


def pinned_kinds(optimizer: penstock.Optimizer) -> set[str]:
    return {row.kind for row in optimizer.locations().rows if row.pinned}


def test_what_the_host_alone_works_on_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 of the 14 bytes per parameter that the cpu tier may hold: page-locked memory is taken from all processes."""
    pinned = pinning_on_cpu(monkeypatch)
    faulted: list[int] = []
    touch = host_memory.touch
    monkeypatch.setattr(
        host_memory,
        "touch",
        lambda allocation, threads: (faulted.append(allocation.numel()), touch(allocation, threads)),
    )
    what, how = Arithmetic(precision="bf16"), Movement(3, "cpu", "cpu", "cpu").but(tile_bytes=4 * KIB)
    states = {"exp_avg", "exp_avg_sq"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = prepared(what, how, separate())
        rows = optimizer.locations().rows
        assert pinned_kinds(optimizer) == {"param", "grad", "staging"}
        assert sum(faulted) >= sum(row.nbytes for row in rows if row.tier == "cpu"), "and is there from the start"
        copied = sum(row.nbytes for row in rows if row.pinned)
        assert copied <= sum(pinned.values()) < copied + 4 * KIB * len(rows), "whole pages"
        optimizer.close()
        _, optimizer = prepared(what, Movement(3, "device", "cpu", "cpu"), separate())
        masters = {(row.dtype, row.pinned) for row in optimizer.locations().rows if row.kind == "master"}
        assert masters == {(torch.bfloat16, True), (torch.int16, False)}, "the shadow goes up"
        optimizer.close()
        _, optimizer = prepared(what, how.but(streamed_updates=0.5), separate())
        assert not any(row.tier == "cpu" and not row.pinned for row in optimizer.locations().rows)
        optimizer.close()
        _, optimizer = prepared(what, Movement(3, optimizer=shares(device=0.5, cpu=0.5)), separate())
        assert pinned_kinds(optimizer) == {"master", "staging"}, "the host updates what is there"
        optimizer.offload_states({"optimizer"})
        assert pinned_kinds(optimizer) >= states, "what moves is pinned as its caller likes"
        assert {row.pinned for row in optimizer.locations().rows if row.kind in states} == {True, False}
        optimizer.close()
        model, (folder,) = make_model(), disks()
        placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu", nvme_path=folder)
        optimizer = prepare_on(separate(), model, what.make_optimizer(list(model.parameters())), placement=placement)
        optimizer.offload_states({"param", "optimizer"}, "nvme")
        optimizer.reload_states()
        assert pinned_kinds(optimizer) == {"param", "grad", "staging"}, "the same as at the start"
        optimizer.close()
    assert pinned == {}, "and is given back"
