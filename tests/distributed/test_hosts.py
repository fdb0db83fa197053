"""Ranks on two hosts that differ in name, memory, disks and folders: what one host lacks all refuse, and name it."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import NvmeError, Options, Placement, memory_budget
from penstock.runtime import control_group
from penstock.runtime.host_memory import HostMemory
from penstock.runtime.system import Host, host_name, names_of_hosts
from tests.lib.engines import loss_of, prepared
from tests.lib.memory import disks
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline

WIDTH = 64


def on_two_hosts() -> None:
    """Ranks 0 and 1 are on host a, ranks 2 and 3 on host b: called in each process before there is a group."""
    real = os.uname()
    name = "ab"[int(os.environ["RANK"]) // 2]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    os.uname = lambda: os.uname_result((real.sysname, name, real.release, real.version, real.machine))


made = partial(prepared, partial(stack, width=WIDTH))


def a_step(**rest: Any) -> bool:
    model, optimizer = made(**rest)
    optimizer.backward(loss_of(model))
    skipped = optimizer.step().skipped
    optimizer.close()
    return not skipped


# Messages


def talk(rank: int) -> None:
    model, optimizer = made(streams=inline)
    weight = model[0].weight
    optimizer.backward(loss_of(model))
    said = said_by(lambda: optimizer.full_param(nn.Parameter(torch.ones(2)) if rank == 3 else weight))
    failed = "EngineError: Rank 3 of 4 (host b) failed in full_param(), and this one stops"
    assert said.startswith("ConfigError: " if rank == 3 else failed)
    text = "Ranks differ in max_norm: rank 0 (host a): 1.0; rank 2 (host b): 2.0. Nothing"
    assert text in said_by(lambda: optimizer.clip_grad_norm_(1.0 + (rank == 2)))
    text = "(rank 0 (host a): step(); rank 1 (host a): full_grad(); rank 2 (host b): step(); rank 3 (host b): step())"
    assert text in said_by(optimizer.step if rank != 1 else lambda: optimizer.full_grad(weight))
    optimizer._engine.context.ranks.sequel.note(f"the gather of {rank // 2}")
    text = "rank 1 (host a): the gather of 0; rank 2 (host b): the gather of 1"
    assert text in said_by(optimizer.step)
    optimizer.close()


def test_one_host_is_not_named_and_names_may_say_anything() -> None:
    assert names_of_hosts([b"a", b"a"]) == ()
    a, b = names_of_hosts([b"\xff\n\x1b[2J" + b"x" * 1000, b"b"])
    assert b == "b"
    assert a.isprintable()
    assert len(a) < 80
    assert host_name() == os.uname().nodename


# What the ranks of a host have together


def budget_of_a_step(**arguments: object) -> memory_budget.MemoryBudget:
    """What was counted before a step."""
    seen: list[memory_budget.MemoryBudget] = []
    real = memory_budget.budget_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "budget_of", lambda *given: seen.append(real(*given)) or seen[0])
        assert a_step(**arguments)
    return seen[0]


@contextmanager
def with_bytes(function: str, on_a: int, on_b: int, made: Callable[[int], object] = int) -> Iterator[None]:
    """What is counted by `memory_budget` is so many bytes on each host."""
    found = made(on_a if host_name() == "a" else on_b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, function, lambda *_: found)
        yield


having = partial(with_bytes, "available_host_memory", made=lambda nbytes: HostMemory(nbytes, "the host has"))
with_free = partial(with_bytes, "free_disk_bytes")


def short_of_memory(rank: int) -> None:
    placement = Placement(params="cpu", optimizer="cpu")
    need = budget_of_a_step(placement=placement).host_bytes  # all of them the same
    with having(1 << 40, need + need // 2):
        said = said_by(lambda: made(placement=placement))
    start = "MemoryBudgetError: Host b, rank 2: The device and the cpu tier share the host's memory, and need "
    assert said.startswith(start)
    assert (
        f"the ranks of host b need {2 * need:,} bytes together (rank 2: {need:,}, rank 3: {need:,}), and the host has "
        f"{need + need // 2:,} available for them, {need - need // 2:,} too few. Move state with Placement("
    ) in said
    with having(1 << 40, 2 * need - 1):
        assert "1 too few" in said_by(lambda: made(placement=placement))
    with having(2 * need, 2 * need):
        assert a_step(placement=placement)


def short_of_disk(rank: int) -> None:
    folder = Path(disks()[0], f"of-host-{host_name()}")  # hosts have paths of their own
    folder.mkdir(exist_ok=True)
    placement = Placement(optimizer="nvme", nvme_path=folder)
    options = Options(update_threads=1 + (host_name() == "b"))
    ((_, need),) = budget_of_a_step(placement=placement, options=options).folders
    with with_free(2 * need, 2 * need - 1), pytest.raises(NvmeError) as caught:
        made(placement=placement)
    said = str(caught.value)
    assert said.startswith(
        f"Host b, rank 2: The nvme tier needs {need:,} bytes on this rank; the ranks of host b need "
    )
    assert "of-host-b' has" in said
    end = "1 too few. Keep less on the nvme tier, or choose another folder with Placement(nvme_path=...)."
    assert said.endswith(end)
    assert caught.value.errno == errno.ENOSPC, "as the kernel would have said"
    with with_free(2 * need, 2 * need):
        assert a_step(placement=placement)


def on_four_ranks(rank: int) -> None:
    talk(rank)
    short_of_memory(rank)
    short_of_disk(rank)


def test_messages_name_hosts_and_what_one_rank_of_a_host_has_is_too_little_for_two_on_every_rank() -> None:
    """One call: its processes are new ones."""
    run_ranks(on_four_ranks, 4, start=on_two_hosts)


def test_ranks_with_limits_of_their_own_share_nothing() -> None:
    host = Host("a", "boot")
    told = {0: [host, 2, [["memory", "/job/0", 10, 10, "x"]]], 1: [host, 2, [["memory", "/job/1", 10, 10, "x"]]]}
    pools = list(memory_budget._pools(told))
    assert [sorted(pool.needed) for pool in pools] == [[0], [1]]
    other = {
        0: [Host("a", "one"), 1, [["disk", "7", 6, 10, "x"]]],
        1: [Host("a", "two"), 1, [["disk", "7", 6, 10, "x"]]],
    }
    assert not any(pool.lacks for pool in memory_budget._pools(other))  # two machines of one name
    (pool,) = memory_budget._pools({rank: [host, 2, [["disk", "7", 6, 11 + rank, "x"]]] for rank in (0, 1)})
    assert (pool.lacks, pool.missing) == (True, 1)


def unreachable(rank: int) -> str:
    def refuse(*_: object) -> object:
        raise RuntimeError("Connection refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_group, "_options", lambda limit: None)
        patch.setattr(torch.distributed, "ProcessGroupGloo", refuse)
        return said_by(made)


def test_ranks_that_cannot_reach_other_hosts_are_told_of_the_interface() -> None:
    for text in run_ranks(unreachable, 2):
        assert "Connection refused" in text
        assert "GLOO_SOCKET_IFNAME" not in text
    for text in run_ranks(unreachable, 3, start=on_two_hosts):
        assert "Ranks of several hosts find each other by GLOO_SOCKET_IFNAME: set it on each host" in text
