"""Process groups of our own: like those of the user, beside them, and gone with their engine."""

import gc
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.runtime import collectives
from penstock.runtime.control_group import own_group
from tests.distributed.wires import hybrid
from tests.lib.engines import loss_of, prepared, train
from tests.lib.ranks import RANK_TIMEOUT, run_ranks

ROOT = Path(__file__).parents[2]


def groups() -> list[str]:
    """Of this process, by name."""
    return sorted(dist.distributed_c10d._world.pg_names.values())


def engines_in_turn_and_at_once(rank: int) -> list[int]:
    mesh = hybrid()
    before, counts = groups(), []
    for how in ({}, {"mesh": mesh}, {"mesh": mesh, "stage": 0}, {"mesh": mesh["shard"]}):
        first, second = prepared(**how), prepared(**how)
        losses = train(*first, steps=2)
        assert train(*second, steps=2) == losses
        counts.append(len(groups()) - len(before))
        first[1].close()
        third = prepared(**how)  # where one was destroyed
        assert train(*third, steps=2) == losses
        third[1].close()
        train(*second)
        second[1].close()
        assert groups() == before, "those of the user alone"
    return counts


def test_engines_in_turn_and_at_once_have_groups_of_their_own_and_leave_none() -> None:
    """At stage 0 both dimensions of the mesh are copies, in one group."""
    assert run_ranks(engines_in_turn_and_at_once, 4) == [[2, 4, 2, 2]] * 4


def two_of_four(rank: int) -> list[int]:
    """Rank 0 has one more group than rank 1, and ranks 2 and 3 know of nothing."""
    alone, pair = dist.new_group([0]), dist.new_group([0, 1])
    found = []
    if rank < 2:
        mesh = DeviceMesh.from_group(pair, "cpu")
        for _ in range(2):
            before = len(groups())
            model, optimizer = prepared(mesh=mesh)
            train(model, optimizer)
            found.append(len(groups()) - before)
            optimizer.close()
            found.append(len(groups()) - before)
            if rank == 0 and len(found) == 2:
                dist.destroy_process_group(alone)
    dist.barrier()
    return found


def test_two_ranks_of_four_with_other_groups_beside_need_nobody_else() -> None:
    pair = [1, 0, 1, 0]
    assert run_ranks(two_of_four, 4) == [pair, pair, [], []]


def likeness(rank: int) -> tuple[bool, timedelta, str, str]:
    given = dist.new_group([1, 0], timeout=timedelta(seconds=17))
    own = own_group(dist.get_process_group_ranks(given), given, "a name", timeout_s=11)
    ranks = dist.get_process_group_ranks(own) == dist.get_process_group_ranks(given)
    timeout = own._get_backend(torch.device("cpu")).options._timeout
    found = ranks, timeout, dist.get_backend_config(own), dist.get_backend_config(given)
    dist.barrier()  # gloo may still be connecting the other rank
    dist.destroy_process_group(own)
    return found


def test_a_group_of_our_own_is_like_the_users() -> None:
    for same_ranks, timeout, own, given in run_ranks(likeness, 2):
        assert same_ranks
        assert timeout == timedelta(seconds=11), "our own, not that of the group that was given"
        assert own == given


def fail_to_prepare(rank: int) -> list[Any]:
    before = groups()
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError):  # at once
        penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp7")  # type: ignore[arg-type]
    at_once = groups() == before
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises((ConfigError, EngineError)):  # when ranks compare what they are about to prepare
        penstock.prepare(model, stock, options=penstock.Options(tile_bytes=4096 * (1 + rank)))
    found = [at_once, groups() == before]
    model, optimizer = prepared()
    found.append(train(model, optimizer) != [])
    optimizer.close()
    return found


def test_a_prepare_that_fails_leaves_no_group() -> None:
    assert run_ranks(fail_to_prepare, 2) == [[True, True, True]] * 2


def drop(rank: int) -> bool:
    before = groups()
    model, optimizer = prepared()
    train(model, optimizer)
    del model, optimizer
    gc.collect()
    return groups() == before


def test_an_optimizer_that_is_dropped_leaves_no_group() -> None:
    assert run_ranks(drop, 2) == [True, True]


def destroy_first(rank: int, store: Path) -> list[str]:
    engines = [prepared() for _ in range(3)]
    for engine in engines:
        train(*engine)
    dist.destroy_process_group()
    said = []
    (_, first), (_, second), (model, third) = engines
    first.close(keep_params=False)
    for use in (second.close, lambda: loss_of(model)):
        with pytest.raises(EngineError) as caught:
            use()
        said.append(str(caught.value))
    third.close(keep_params=False)
    # Other groups under the old names are no business of ours.
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=RANK_TIMEOUT)
    model, optimizer = prepared()
    train(model, optimizer)
    optimizer.close()
    return said


def test_groups_that_are_destroyed_before_close_end_it_with_an_error(tmp_path: Path) -> None:
    for said in run_ranks(destroy_first, 2, tmp_path / "second"):
        for message in said:
            assert "destroy_process_group() has ended the process groups of this engine" in message


def hooks_while_issued(rank: int) -> tuple[set[bool], bool]:
    """Whether hooks of saved tensors are set in any collective of a step, and in the forward after its gathers."""
    is_set = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
    found, inside = set(), []
    model, optimizer = prepared()
    model[1].register_forward_pre_hook(lambda *_: inside.append(is_set() is not None))
    issue = collectives.all_gather_flat

    def spied(*args: Any, **kwargs: Any) -> Any:
        found.add(is_set() is not None)
        return issue(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.save_on_cpu():
        patch.setattr(collectives, "all_gather_flat", spied)
        train(model, optimizer)
    train(model, optimizer)  # with the engine's own
    optimizer.close()
    return found, all(inside)


def test_no_collective_is_issued_with_hooks_of_saved_tensors() -> None:
    """A thread of gloo would take the interpreter's lock for them: a process that exits meanwhile was aborted."""
    assert run_ranks(hooks_while_issued, 2) == [({False}, True)] * 2


# Ranks leave once both are through: torch promises nothing to one whose last collective another one's exit has cut off.
# They are forks of one program, which has imported for both.
EXIT = """
import os, sys, time
from pathlib import Path
import torch
import torch._dynamo
import torch.distributed as dist
from tests.lib.engines import prepared, train

ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    sys.exit(any([os.waitpid(process, 0)[1] for process in ranks]))
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
engine = prepared()
train(*engine)
Path(folder, f"through {rank}").touch()
while not Path(folder, f"through {1 - rank}").exists():
    time.sleep(0.01)
"""


def test_a_program_of_two_ranks_that_ends_nothing_exits_in_silence(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", EXIT, tmp_path]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
