"""What the ranks of two hosts do; and those of one, to compare."""

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock
from penstock import Options, Placement
from tests.hosts.two import RANKS, sent_bytes
from tests.lib.models import stack
from tests.lib.refusals import said_by

HOSTS, STEPS = 2, 2
BLOCKS, WIDTH = 4, 512
UNIT_BYTES = 2 * WIDTH * WIDTH  # in bf16, in whole pages of every shard: nothing is padded


class Row(NamedTuple):
    """A mesh and a stage: copies and shards over four ranks, or no mesh."""

    name: str
    stage: int
    copies: int = 1
    blocks: int = BLOCKS
    width: int = WIDTH


HYBRID = Row("hybrid", 3, copies=HOSTS)
TINY = Row("hybrid, next to nothing", 3, copies=HOSTS, blocks=2, width=32)
DISKS = Row("hybrid, on disks", 3, copies=HOSTS, blocks=2, width=256)
ROWS = (HYBRID, Row("sharded", 3), Row("copies", 0), TINY)


def net(row: Row, seed: int) -> nn.Sequential:
    return stack(layers=row.blocks, width=row.width, bias=False, seed=seed)


def mesh_of(row: Row) -> DeviceMesh:
    shards = HOSTS * RANKS // row.copies
    return init_device_mesh("cpu", (row.copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))


def prepared(row: Row, **rest: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    model = net(row, seed=dist.get_rank())
    return model, penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        stage=row.stage,
        mesh=mesh_of(row),
        units=(nn.Linear,),
        **{"options": Options(persistent_bytes=0), "max_grad_norm": 1.0} | rest,
    )


def train(rank: int, row: Row, sent: Callable[[], int] = lambda: 0, **rest: Any) -> dict[str, Any]:
    """Some steps: losses and states, and the bytes that this host has sent meanwhile."""
    before = sent()
    model, optimizer = prepared(row, **rest)
    from_first = settled(sent)
    first = zip(model.parameters(), net(row, seed=0).parameters(), strict=True)
    assert all(torch.equal(optimizer.full_param(p), q) for p, q in first)  # every rank has the first one's values
    before += settled(sent) - from_first
    losses = []
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {}
    for step in range(1 + STEPS):
        if step == 1:
            found["first_step"] = settled(sent) - before
            before = settled(sent)
        x = torch.randn(2, row.width, generator=generator)
        loss = model(x).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.synchronize()
    found |= {"losses": losses, "sent": settled(sent) - before}
    found["states"] = [optimizer.full_param(p) for p in model.parameters()]
    found["states"] += [optimizer.full_state(p, "exp_avg_sq") for p in model.parameters()]
    optimizer.close()
    return found


def settled(sent: Callable[[], int]) -> int:
    """What was sent once nothing is under way any more."""
    dist.barrier()
    time.sleep(0.1)  # acknowledgements
    count = sent()
    dist.barrier()
    return count


def train_all(rank: int) -> dict[str, Any]:
    return {row.name: train(rank, row) for row in (*ROWS, DISKS)}


def on_disks(rank: int, folder: Path) -> dict[str, Any]:
    """Files on each host's own disk, in a folder that the other host calls otherwise; and a disk for one rank alone."""
    disk = Path(folder, os.uname().nodename, "disk")
    placement = Placement(optimizer="nvme", nvme_path=disk)
    found = train(rank, DISKS, placement=placement)
    dist.barrier()  # close() waits for no other rank to remove its folder
    found["left"] = sorted(path.name for path in disk.iterdir())
    large = DISKS._replace(blocks=8, width=1024)  # takes 40 MiB of files on each rank
    found["refused"] = said_by(lambda: prepared(large, placement=placement))
    dist.barrier()
    found["left after"] = sorted(path.name for path in disk.iterdir())
    return found


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, host = dist.get_rank(), os.uname().nodename
    if host == "b":  # it has fewer cores, and its clock is wrong
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        real = time.time
        time.time = lambda: real() + 86_400
    link = os.environ["GLOO_SOCKET_IFNAME"]
    found: dict[str, Any] = {"host": host}
    found["rows"] = {row.name: train(rank, row, lambda: sent_bytes(link)) for row in ROWS}
    found["disks"] = on_disks(rank, Path(folder))
    model, optimizer = prepared(HYBRID)
    stranger = nn.Parameter(torch.ones(2)) if rank == 3 else model[0].weight
    found["stranger"] = said_by(lambda: optimizer.full_param(stranger))
    optimizer.close()
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
