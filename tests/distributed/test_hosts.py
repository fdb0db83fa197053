"""Ranks on two hosts that differ in name, memory, disks and folders: what one host lacks all refuse, and name it."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock import MemoryBudgetError, NvmeError, Options, Placement, memory_budget
from penstock.blueprint import PrepareRequest
from penstock.errors import PenstockError
from penstock.runtime import control_group
from penstock.runtime.host_memory import HostMemory
from penstock.runtime.system import Host, host_name, names_of_hosts
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.streams import inline, separate
from tests.support import run_ranks

WIDTH = 64


def on_two_hosts() -> None:
    """Ranks 0 and 1 are on host a, ranks 2 and 3 on host b: called in each process before there is a group."""
    real = os.uname()
    name = "ab"[int(os.environ["RANK"]) // 2]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    os.uname = lambda: os.uname_result((real.sysname, name, real.release, real.version, real.machine))


def made(**rest: object) -> tuple[nn.Module, penstock.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    rest.setdefault("streams", separate())
    streams = rest.pop("streams")
    return model, prepare_on(streams, model, torch.optim.AdamW(model.parameters()), **rest)  # type: ignore[arg-type]


def said_by(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except PenstockError as error:
        return type(error).__name__, str(error)
    return "", ""


def a_step(**rest: object) -> bool:
    model, optimizer = made(**rest)
    optimizer.backward(model(torch.ones(1, WIDTH)).float().sum())
    skipped = optimizer.step().skipped
    optimizer.close()
    return not skipped


# Messages


def talk(rank: int) -> dict[str, tuple[str, str]]:
    model, optimizer = made(streams=inline(), precision="fp32")
    weight = model[0].weight
    optimizer.backward(model(torch.ones(1, WIDTH)).sum())
    stranger = nn.Parameter(torch.ones(2))
    found = {
        "refusal": said_by(lambda: optimizer.full_param(stranger if rank == 3 else weight)),
        "difference": said_by(lambda: optimizer.clip_grad_norm_(1.0 + (rank == 2))),
        "methods": said_by(optimizer.step if rank != 1 else lambda: optimizer.full_grad(weight)),
    }
    optimizer._engine.context.ranks.sequel.note(f"the gather of {rank // 2}")
    found["collectives"] = said_by(optimizer.step)
    optimizer.close()
    return found


def test_messages_name_the_hosts_of_ranks_where_there_are_several() -> None:
    on_each = run_ranks(talk, 4, start=on_two_hosts)
    assert "Rank 3 of 4 (host b) failed in full_param(), and this one stops" in on_each[0]["refusal"][1]
    assert [kind for kind, _ in (found["refusal"] for found in on_each)] == ["EngineError"] * 3 + ["ConfigError"]
    for found in on_each:
        text = "Ranks differ in max_norm: rank 0 (host a): 1.0; rank 2 (host b): 2.0. Nothing"
        assert text in found["difference"][1]
        text = (
            "(rank 0 (host a): step(); rank 1 (host a): full_grad(); rank 2 (host b): step(); rank 3 (host b): step())"
        )
        assert text in found["methods"][1]
        text = "rank 1 (host a): the gather of 0; rank 2 (host b): the gather of 1"
        assert text in found["collectives"][1]


def test_one_host_is_not_named_and_names_may_say_anything() -> None:
    assert names_of_hosts([b"a", b"a"]) == ()
    a, b = names_of_hosts([b"\xff\n\x1b[2J" + b"x" * 1000, b"b"])
    assert b == "b"
    assert a.isprintable()
    assert len(a) < 80
    assert host_name() == os.uname().nodename


# What the ranks of a host have together


def claimed(streams: object, placement: Placement) -> int:
    """What each rank claims of its host: all of them the same."""
    return budget_of_a_step(streams=streams, placement=placement).host_bytes


def budget_of_a_step(**arguments: object) -> memory_budget.MemoryBudget:
    """What was counted before a step."""
    seen: list[memory_budget.MemoryBudget] = []
    real = memory_budget.budget_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "budget_of", lambda *given: seen.append(real(*given)) or seen[0])
        assert a_step(**arguments)
    return seen[0]


def needs_nothing() -> memory_budget.MemoryBudget:
    nothing = memory_budget.Need({})
    ends = {"is_shared": False, "is_ahead": False, "request": PrepareRequest()}
    return memory_budget.MemoryBudget(device=nothing, host=nothing, files=nothing, pinned_bytes=0, folders=(), **ends)  # type: ignore[arg-type]


@contextmanager
def having(on_a: int, on_b: int) -> Iterator[None]:
    """Each host has so many bytes of memory."""
    nbytes = on_a if host_name() == "a" else on_b
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "available_host_memory", lambda: HostMemory(nbytes, "the host has"))
        yield


@contextmanager
def with_free(on_a: int, on_b: int) -> Iterator[None]:
    """Each host's disk has so many bytes free."""
    nbytes = on_a if host_name() == "a" else on_b
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "free_disk_bytes", lambda folder: nbytes)
        yield


def short_of_memory(rank: int) -> dict[str, object]:
    placement = Placement(params="cpu", optimizer="cpu")
    need = claimed(separate(), placement)
    found: dict[str, object] = {"need": need}
    with having(1 << 40, need + need // 2):
        found["one fits"] = said_by(lambda: made(placement=placement))
    with having(1 << 40, 2 * need - 1):
        found["a byte"] = said_by(lambda: made(placement=placement))
    with having(2 * need, 2 * need):
        found["both fit"] = a_step(placement=placement)
    return found


def test_memory_for_one_rank_of_a_host_is_too_little_for_two_on_every_rank() -> None:
    on_each = run_ranks(short_of_memory, 4, start=on_two_hosts)
    assert all(found == on_each[0] for found in on_each)
    found = on_each[0]
    need = found["need"]
    kind, text = found["one fits"]
    assert kind == MemoryBudgetError.__name__
    assert text.startswith("Host b, rank 2: The device and the cpu tier share the host's memory, and need ")
    assert (
        f"the ranks of host b need {2 * need:,} bytes together (rank 2: {need:,}, rank 3: {need:,}), and the host has "
        f"{need + need // 2:,} available for them, {need - need // 2:,} too few. Move state with Placement("
    ) in text
    assert "1 too few" in found["a byte"][1]
    assert found["both fit"] is True


def short_of_disk(rank: int) -> dict[str, object]:
    folder = Path(disks()[0], f"of-host-{host_name()}")  # hosts have paths of their own
    folder.mkdir(exist_ok=True)
    placement = Placement(optimizer="nvme", nvme_path=folder)
    options = Options(update_threads=1 + (host_name() == "b"))
    ((_, need),) = budget_of_a_step(placement=placement, options=options).folders
    with with_free(2 * need, 2 * need - 1):
        refused = said_by(lambda: made(placement=placement))
    with with_free(2 * need, 2 * need):
        return {"need": need, "refused": refused, "fits": a_step(placement=placement)}


def test_a_disk_for_one_rank_of_a_host_is_too_little_for_two_on_every_rank() -> None:
    on_each = run_ranks(short_of_disk, 4, start=on_two_hosts)
    assert all(found == on_each[0] for found in on_each)
    kind, text = on_each[0]["refused"]
    need = on_each[0]["need"]
    assert kind == NvmeError.__name__
    assert text.startswith(
        f"Host b, rank 2: The nvme tier needs {need:,} bytes on this rank; the ranks of host b need "
    )
    assert "of-host-b' has" in text
    assert text.endswith(
        "1 too few. Keep less on the nvme tier, or choose another folder with Placement(nvme_path=...)."
    )
    assert on_each[0]["fits"] is True


def test_a_refusal_of_disks_says_what_the_kernel_would_have() -> None:
    class Two:
        size, members, rank = 2, (0, 1), 0

        def collect(self, value: object) -> list[object]:
            return [json.loads(json.dumps(value))] * 2

    free = memory_budget.free_disk_bytes(disks()[0])
    budget = replace(needs_nothing(), folders=[(disks()[0], free * 2 // 3)])
    with pytest.raises(NvmeError) as caught:
        memory_budget.check_hosts(Two(), budget)  # type: ignore[arg-type]
    assert caught.value.errno == errno.ENOSPC


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
        return said_by(made)[1]


def test_ranks_that_cannot_reach_other_hosts_are_told_of_the_interface() -> None:
    for text in run_ranks(unreachable, 2):
        assert "Connection refused" in text
        assert "GLOO_SOCKET_IFNAME" not in text
    for text in run_ranks(unreachable, 3, start=on_two_hosts):
        assert "Ranks of several hosts find each other by GLOO_SOCKET_IFNAME: set it on each host" in text
