"""Steps on this machine: the planner's figures are probed, each kind of operation is timed once, and the clock decides.

A model on the cpu as the device, with state in memory and in files; and ranks of a process group on one host.
"""

import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import penstock
from penstock.planner import Machine, plan
from penstock.planner.this_machine import machine_of_ranks
from planning.models import batch, large, llama
from planning.rows import row, summary

WARM_UP, STEPS, SECONDS = 2, 3, 30
ROUNDS, SMALL_STEPS, SMALL_SECONDS = 5, 5, 8


def cpu() -> dict[str, Any]:
    """A model of 355M parameters, in three placements."""
    with tempfile.TemporaryDirectory() as folder:
        found = Machine.probe(folders=[folder], seconds=SECONDS)
        files = {"nvme_path": folder}
        placements = {
            "all in memory": penstock.Placement(),
            "state in files": penstock.Placement(optimizer="nvme", **files),
            "all in files": penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", **files),
        }
        rows = []
        for name, placement in placements.items():
            predicted = _predicted("355m", placement, found, [folder])
            rows.append(row(f"355m, {name}", predicted, _measured("355m", placement)))
    return summary(rows)


def small() -> dict[str, Any]:
    """A model of 23M parameters, in five placements, as `penstock plan` says after a fresh probe.

    The pace of a shared machine drifts by a third within a minute: a round probes, then predicts and runs each row, and
    a row has the median of its ratios.
    """
    half = {"device": 0.5, "cpu": 0.5}
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Any] = {"nvme_path": folder}
        placements = {
            "all on the device": penstock.Placement(),
            "all on the cpu": penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
            "optimizer in files": penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", **files),
            "all in files": penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", **files),
            "split, a quarter in files": penstock.Placement(
                params=half, grads=half, optimizer={"cpu": 0.5, "nvme": 0.5}, **files
            ),
        }
        for _ in range(ROUNDS):
            machine = Machine.probe(folders=[folder], seconds=SMALL_SECONDS)
            for name, placement in placements.items():
                predicted = _predicted("small", placement, machine, [folder], measure=False)
                found.setdefault(name, []).append((predicted, _measured("small", placement, steps=SMALL_STEPS)))
    rows = []
    for name, pairs in found.items():
        predicted, measured = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
        ratios = [each / took for each, took in pairs]
        rows.append(row(f"23M, {name}", predicted, measured, rounds=ratios))
    return summary(rows)


def ranks() -> dict[str, Any]:
    """Ranks of one host over gloo, on a small model with some bytes to send."""
    rows = []
    for world_size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, (world_size, folder), world_size, start_method="spawn")
            predicted, measured = torch.load(Path(folder, "found"))
        rows.append(row(f"{world_size} ranks, all in memory", predicted, measured))
    return summary(rows)


def _rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    found = machine_of_ranks()
    placement = penstock.Placement()
    predicted = 0.0
    if found is not None:
        predicted = _predicted("small", placement, found, (), world_size=world_size)
    dist.barrier()
    measured = _measured("small", placement)
    if rank == 0:
        torch.save((predicted, measured), Path(folder, "found"))
    dist.barrier()
    dist.destroy_process_group()


def _model(name: str) -> torch.nn.Module:
    if name == "small":
        return llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, vocab_size=4096).to(torch.float32)
    return large(name)


def _batch(name: str) -> dict[str, torch.Tensor]:
    return batch(2, 64) if name == "small" else batch(1, 128)


def _predicted(
    name: str,
    placement: penstock.Placement,
    found: Machine,
    folders: Any,
    world_size: int = 1,
    measure: bool = True,
) -> float:
    def make() -> torch.nn.Module:
        return _model(name)

    answer = plan(
        make,
        torch.optim.AdamW,
        lambda: _batch(name),
        machine=found,
        folders=folders,
        placement=placement,
        world_size=world_size,
        measure=measure,
        precision="fp32",
    )
    return answer.step_s


def _measured(name: str, placement: penstock.Placement, steps: int = STEPS) -> float:
    torch.manual_seed(0)
    model = _model(name)
    stock = torch.optim.AdamW(model.parameters(), lr=1e-5)
    optimizer = penstock.prepare(model, stock, placement=placement, precision="fp32", overlap="forward")
    inputs = _batch(name)
    taken = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        optimizer.backward(model(**inputs).loss)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    optimizer.close(keep_params=False)
    return statistics.median(taken[WARM_UP:])
