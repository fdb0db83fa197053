"""Pinned memory and free memory, row by row: what a slab costs, how fast it is beside torch's own, what comes back.

    python benchmarks/gpu/pinning.py            # prints its rows; gpu_check.py keeps them in its report

Without an accelerator nothing is registered: the same rows copy within the host's memory, small and quick.
"""

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from journal import Journal
from torch import Tensor

import penstock
from penstock.runtime.hardware import default_device
from penstock.runtime.host_memory import Arena, available_host_memory, can_register
from penstock.runtime.system import device_node

ROUNDS = 5
Item = Callable[[], dict[str, Any]]


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def gigabytes_per_second(nbytes: int, work: Callable[[], object], device: torch.device) -> float:
    """Of one run, from one synchronisation to the next."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return nbytes / (time.perf_counter() - started) / 1e9


def free_memory(device: torch.device) -> dict[str, Any]:
    """What the host and the device have left, as the system says."""
    found: dict[str, Any] = {
        "host_available": getattr(available_host_memory(), "nbytes", None),
        "resident": machine.process_bytes("VmRSS"),
        "page_locked": machine.process_bytes("VmLck") + machine.process_bytes("VmPin"),
    }
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        if hasattr(module, "mem_get_info"):
            found["device_free"], found["device_total"] = module.mem_get_info(device)
        found["device_allocated"] = module.memory_allocated(device)
        found["device_reserved"] = module.memory_reserved(device)
    return found


def limits(device: torch.device) -> dict[str, Any]:
    """What the system allows: memory, locked memory, the control group, the device's node."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    group = Path("/sys/fs/cgroup/memory.max")
    return free_memory(device) | {
        "limit_of_locked_memory": "none" if locked == resource.RLIM_INFINITY else locked,
        "limit_of_the_control_group": group.read_text().strip() if group.exists() else "unknown",
        "node_of_the_device": device_node(device) if device.type == "cuda" else None,
    }


def wake_up(device: torch.device, *, spins: bool) -> dict[str, Any]:
    """Submit a small kernel and wait for its event: microseconds until the host goes on, asleep or spinning."""
    if device.type == "cpu":
        return {"note": "a cpu has no events"}
    work = torch.zeros(1 << 20, device=device)
    found = []
    for _ in range(200):
        event: Any = torch.get_device_module(device).Event(enable_timing=False, blocking=not spins)
        wait(device)
        started = time.perf_counter()
        work.add_(1)
        event.record()
        event.synchronize()
        found.append(time.perf_counter() - started)
    return {"microseconds": 1e6 * statistics.median(found), "of": "one small kernel, its event and the wait for it"}


def take_slab(nbytes: int, device: torch.device) -> dict[str, Any]:
    """Map a slab, fault it in and register it, and give it back: seconds, and what the system says of it."""
    before = free_memory(device)
    started = time.perf_counter()
    slab = Arena(nbytes, device)
    taken = time.perf_counter() - started
    allocate = slab.allocate(nbytes, torch.uint8)
    pinned = slab.pinned
    known = can_register(device) and allocate.is_pinned() and allocate[-1:].is_pinned()
    during = free_memory(device)
    started = time.perf_counter()
    slab.close()
    still_known = can_register(device) and allocate.is_pinned()
    closed = time.perf_counter() - started
    del allocate
    gc.collect()
    after = free_memory(device)
    kept = after["resident"] - before["resident"]
    wrong = [
        *(["the slab was not registered"] if can_register(device) and not pinned else []),
        *(["torch does not know it as pinned"] if pinned and not known else []),
        *(["it is known as pinned after it was closed"] if still_known else []),
        *([f"{kept:,} bytes stayed resident"] if kept > max(nbytes // 10, 64 << 20) else []),
    ]
    return {
        "bytes": nbytes,
        "pinned": pinned,
        "take_seconds": taken,
        "take_gb_per_second": nbytes / taken / 1e9,
        "take_seconds_per_gib": taken / (nbytes / (1 << 30)),
        "close_seconds": closed,
        "before": before,
        "during": during,
        "after": after,
        "wrong": "; ".join(wrong),
    }


def take_huge(device: torch.device) -> dict[str, Any]:
    """Take a slab of 32 GiB, as whole models need: what registering more than a few GiB costs by the GiB."""
    free = available_host_memory()
    if device.type == "cpu" or free is None or free.nbytes < 48 << 30:
        return {"note": "needs a device that registers memory, and 48 GiB of the host"}
    return take_slab(32 << 30, device)


def bandwidths(nbytes: int, device: torch.device) -> dict[str, Any]:
    """Copies up and down of a slab, of memory that torch pinned and of pageable memory, in turns; medians."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    slab = Arena(nbytes, device)
    hosts: dict[str, Tensor] = {"slab": slab.allocate(nbytes, torch.uint8)}
    if device.type != "cpu":
        hosts["torch"] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    hosts["pageable"] = torch.ones(nbytes, dtype=torch.uint8)
    rates: dict[str, list[float]] = {f"{name} {way}": [] for name in hosts for way in ("up", "down")}
    for number in range(ROUNDS + 1):  # the first one warms up
        for name, host in hosts.items():
            ways = {"up": partial(there.copy_, host, non_blocking=True)}
            ways["down"] = partial(host.copy_, there, non_blocking=True)
            for way, work in ways.items():
                rate = gigabytes_per_second(nbytes, work, device)
                if number:
                    rates[f"{name} {way}"].append(rate)
    found: dict[str, Any] = {"bytes": nbytes, "gb_per_second": {k: statistics.median(v) for k, v in rates.items()}}
    if "torch" in hosts:
        found["slab_of_torch"] = {
            way: statistics.median(a / b for a, b in zip(rates[f"slab {way}"], rates[f"torch {way}"], strict=True))
            for way in ("up", "down")
        }
    hosts.clear()
    slab.close()
    return found


def both_ways(nbytes: int, device: torch.device) -> dict[str, Any]:
    """Up and down at once, on a stream each: whether one direction takes from the other."""
    if device.type == "cpu":
        return {"note": "a cpu has no streams"}
    slab = Arena(2 * nbytes, device)
    hosts = [slab.allocate(nbytes, torch.uint8) for _ in range(2)]
    theres = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)]

    def copy_both() -> None:
        with streams[0]:
            theres[0].copy_(hosts[0], non_blocking=True)
        with streams[1]:
            hosts[1].copy_(theres[1], non_blocking=True)

    rates = [gigabytes_per_second(2 * nbytes, copy_both, device) for _ in range(ROUNDS + 1)][1:]
    slab.close()
    return {"bytes": 2 * nbytes, "gb_per_second": statistics.median(rates)}


def a_run_gives_back(device: torch.device) -> dict[str, Any]:
    """Prepare, train, close, with everything on the host: what the process and the device have afterwards."""

    def train() -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
        placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
        optimizer = penstock.prepare(model, stock, placement=placement, max_grad_norm=1.0)
        for _ in range(3):
            optimizer.backward(model(torch.randn(8, 512, device=device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close(keep_params=False)

    readings = []
    for _ in range(3):  # the first one pays for contexts, workspaces and kernels
        train()
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        readings.append(free_memory(device))
    slack = 32 << 20
    wrong = [
        f"{key} changed by {readings[-1][key] - readings[0][key]:,} bytes in two further runs"
        for key in ("resident", "page_locked", "device_free", "device_allocated")
        if key in readings[0] and abs(readings[-1][key] - readings[0][key]) > slack
    ]
    return {"readings": readings, "wrong": "; ".join(wrong)}


def main() -> None:
    """Write a row for each item."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slab-mib", type=int, help="default: 256, without an accelerator 8")
    parser.add_argument("--large-mib", type=int, help="default: 8192, without an accelerator 32")
    arguments = parser.parse_args()
    device = default_device()
    alone = device.type == "cpu"
    torch.ones(1, device=device)  # the device's context takes memory of the host: before anything is counted
    wait(device)
    slab = (arguments.slab_mib or (8 if alone else 256)) << 20
    large = (arguments.large_mib or (32 if alone else 8192)) << 20
    items: dict[str, Item] = {
        "limits": partial(limits, device),
        "slab": partial(take_slab, slab, device),
        "bandwidth": partial(bandwidths, slab, device),
        "both ways at once": partial(both_ways, slab, device),
        "large slab": partial(take_slab, large, device),
        "32 GiB slab": partial(take_huge, device),
        "wake-up, sleeping": partial(wake_up, device, spins=False),
        "wake-up, spinning": partial(wake_up, device, spins=True),
        "a run gives back": partial(a_run_gives_back, device),
    }
    journal = Journal()
    for name, item in items.items():
        journal.take(name, item)


if __name__ == "__main__":
    main()
