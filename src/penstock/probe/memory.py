"""The host's memory: its bandwidth, the updates that run on it, how much is free, and how much a device may pin."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.layout import round_up
from penstock.probe.sampling import Deadline, Measurement, Turns, seconds_of, take_turns
from penstock.probe.updates import BF16, FP32, RULES, Update, fill
from penstock.rules import Pool
from penstock.runtime.accelerator import streams_for
from penstock.runtime.hardware import free_device_memory, shares_host_memory
from penstock.runtime.host_memory import (
    PAGE_BYTES,
    Arena,
    available_host_memory,
    can_register,
    needs_pinning,
    page_aligned,
    touch,
)
from penstock.runtime.streams import DONE, DOWNLOAD, UPDATE, Event, Streams
from penstock.runtime.system import UpdateCores, core_quota, ranks_of_host, share_of_cores, update_cores

LEAST_BYTES, MOST_BYTES = 64 << 20, 2 << 30  # that passes go over; between them, several times the caches
LITTLE_BYTES, LITTLE_SECONDS = 160 << 20, 4.0  # in less time, less memory
CACHES = Path("/sys/devices/system/cpu")
PIN_STEP_BYTES, MOST_PIN_BYTES = 1 << 28, 1 << 34
JOBS, HAND_OVERS = 200, 50


def measure_host(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Measure the bandwidth of the host's memory, and its updates.

    Arguments:
        device: the one that computes; the threads of the updates are near it.
        deadline: when to be done.

    Returns:
        `host_threads`, `host_bandwidth`, `update` and `update_<rule>`.
    """
    cores, load = cores_of_updates(device), os.getloadavg()[0]
    memory = page_aligned(bytes_of_passes(deadline))
    touch(memory, cores.count)
    fill(memory)
    counts = sorted({1, max(1, cores.count // 2), cores.count})
    with contextlib.ExitStack() as closing:
        pools: dict[int, Pool] = {}
        for count in counts:
            with_count = cores.with_threads(count)
            pools[count] = Pool(count, sorted(with_count.cores or ()))
            closing.callback(pools[count].close)
        cases: dict[str, Callable[[], float]] = {
            f"copy {count}": partial(_copy, pools[count], memory) for count in counts
        }
        for name in RULES:
            for precision in (BF16, FP32):
                update = Update(name, precision, memory)
                cases[f"{name} {precision}"] = partial(_update, update, pools[cores.count], memory)
        turns = take_turns(cases, deadline)
    # Figures of a machine that others use are those of what they leave: who reads them is to know.
    threads = Measurement(
        *(float(cores.count),) * 3,
        f"the cores that updates on this host get, within the container's quota; the load was {load:.1f} before",
    )
    return {"host_threads": threads, **_host_figures(turns, counts, memory.numel())}


def cores_of_updates(device: torch.device) -> UpdateCores:
    """Choose the cores of the updates on this host: of the one rank there is, or of all of them together.

    Figures are the host's: ranks that update at once share them.
    """
    return update_cores(device) if ranks_of_host() == 1 else share_of_cores({}, quota=core_quota())


def _host_figures(turns: Turns, counts: list[int], nbytes: int) -> dict[str, Measurement]:
    """Make figures of the passes over host memory."""
    words = _threads(counts[-1])
    figures = {}
    for name in RULES:
        other = turns.median(f"{name} {FP32}") / 1e9
        how = f"{name} of {BF16} in tiles, {nbytes >> 20} MiB in all, on {words}; in fp32 {other:.1f} GB/s"
        figures[f"update_{name}"] = turns.measurement(f"{name} {BF16}", how)
    # What the memory can do is what any pass gets out of it: a copy reads what it is about to overwrite, and moves more
    # than it is counted for, an update in place does not.
    best = max(turns.samples, key=turns.median)
    copies = ", ".join(f"{turns.median(f'copy {n}') / 1e9:.1f} on {_threads(n)}" for n in counts)
    what = f"a copy on {_threads(int(best.split()[1]))}" if best.startswith("copy") else f"{best} on {words}"
    host = turns.measurement(best, f"the fastest pass, {what}, read and written; copies: {copies} (GB/s)")
    return {"host_bandwidth": host, "update": figures["update_adamw"], **figures}


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _copy(pool: Pool, memory: Tensor) -> float:
    """Copy the first half of memory to the second; bytes/s, read and written."""
    nbytes = memory.numel() // 2 // PAGE_BYTES * PAGE_BYTES
    address = memory.data_ptr()
    return 2 * nbytes / seconds_of(lambda: pool.copy(address + nbytes, address, nbytes))


def _update(update: Update, pool: Pool, memory: Tensor) -> float:
    """Update every tile; bytes/s, read and written."""
    fill(memory)  # where another rule has had its masters, this one would find numbers that no training has
    return update.nbytes / seconds_of(lambda: update.run(pool))


def bytes_of_passes(deadline: Deadline) -> int:
    """Choose how much memory passes go over: several times the caches, no burden to a small host or in little time."""
    free = available_host_memory()
    most = MOST_BYTES if free is None else min(MOST_BYTES, free.nbytes // 8)
    if deadline.left() < LITTLE_SECONDS:
        most = min(most, LITTLE_BYTES)
    return round_up(max(LEAST_BYTES, min(5 * cache_bytes(), most)), PAGE_BYTES)


def cache_bytes(folder: Path = CACHES) -> int:
    """Count the bytes of the host's last caches; 32 MiB where the kernel does not say."""
    found: dict[tuple[int, str], int] = {}
    for index in folder.glob("cpu[0-9]*/cache/index*"):
        with contextlib.suppress(OSError, ValueError):
            size = (index / "size").read_text().strip()
            nbytes = int(size.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            shared = (index / "shared_cpu_list").read_text().strip()
            found[int((index / "level").read_text()), shared] = nbytes
    last = max((level for level, _ in found), default=0)
    return sum(nbytes for (level, _), nbytes in found.items() if level == last) or 32 << 20


def measure_room(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Say how much memory is free now.

    Arguments:
        device: the one that computes.
        deadline: when to be done.

    Returns:
        `device_memory`, `host_memory` and `pinnable_memory`; what nothing tells is left out.
    """
    figures = free_memory(device)
    if "host_memory" in figures:
        figures["pinnable_memory"] = _pinnable(device, int(figures["host_memory"].value), deadline)
    return figures


def free_memory(device: torch.device) -> dict[str, Measurement]:
    """Say how much memory is free now: `device_memory` and `host_memory`, as far as something tells."""
    figures = {}
    free = available_host_memory()
    if free is not None:
        figures["host_memory"] = Measurement(*(float(free.nbytes),) * 3, f"{free.whose} so much available now")
    on_device = free_device_memory(device)
    if on_device is not None:
        figures["device_memory"] = Measurement(*(float(on_device),) * 3, "free on the device now")
    elif free is not None and shares_host_memory(device):
        figures["device_memory"] = figures["host_memory"]._replace(how="the device's memory is the host's")
    return figures


def _pinnable(device: torch.device, free: int, deadline: Deadline) -> Measurement:
    """Find out how much memory can be page-locked, by doing so in steps that double. All of it is given back."""
    if not needs_pinning(device):
        return Measurement(*(float(free),) * 3, "a cpu needs no page-locked memory: all that the host has")
    if not can_register(device):
        return Measurement(*(float(PAGE_BYTES),) * 3, f"torch page-locks no memory in place for {device.type}")
    nbytes, locked, seconds = PIN_STEP_BYTES, PAGE_BYTES, 0.0
    # A step takes twice the time of the one before it, and the host has to keep room for everybody else.
    while nbytes <= min(MOST_PIN_BYTES, free // 4) and 2 * seconds < deadline.left():
        arena: Arena | None = None

        def lock(nbytes: int = nbytes) -> None:
            nonlocal arena
            arena = Arena(nbytes, device)

        try:
            seconds = seconds_of(lock)
            assert arena is not None
            if not arena.pinned:
                how = f"page-locked {locked:,} bytes at once; {nbytes:,} were refused"
                return Measurement(float(locked), float(locked), float(nbytes), how)
        finally:
            if arena is not None:
                arena.close()
        nbytes, locked = 2 * nbytes, nbytes
    how = f"page-locked {locked:,} bytes at once, and was refused none: taken for all that the host has"
    return Measurement(float(free), float(locked), float(free), how)


def measure_jobs(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Measure what a job on a stream costs, beside what it does: `job_seconds`; of an accelerator `wake_seconds`."""
    streams = streams_for(device)
    cases = {"jobs": partial(_run_jobs, streams)}
    if device.type != "cpu":
        cases["hand-overs"] = partial(_run_hand_overs, streams, device)
    try:
        turns = take_turns(cases, deadline)
    finally:
        streams.close()
    how = f"{JOBS} jobs with nothing to do on the stream of updates, each after the one before it"
    found = {"job_seconds": turns.measurement("jobs", how)}
    if "hand-overs" in cases:
        how = (
            f"{HAND_OVERS} times from a stream of the device to a thread of the host and back, with nothing to do, "
            "while another thread enqueues operations"
        )
        found["wake_seconds"] = turns.measurement("hand-overs", how)
    return found


def _run_jobs(streams: Streams) -> float:
    """Run jobs without work, and return the seconds of each."""

    def jobs() -> None:
        event: Event = DONE
        for _ in range(JOBS):
            event = streams.submit(UPDATE, _nothing, after=(event,))
        event.synchronize()

    return seconds_of(jobs) / JOBS


def _run_hand_overs(streams: Streams, device: torch.device) -> float:
    """Go to and fro between a stream of the device and a thread of the host; return the seconds of one way.

    Threads that go on want the interpreter, which in a forward is busy: so it is here.
    """
    values = torch.zeros(1, device=device)

    def chain() -> None:
        event: Event = DONE
        for _ in range(HAND_OVERS):
            event = streams.submit(DOWNLOAD, _nothing, after=(event,))
            event = streams.submit(UPDATE, _nothing, after=(event,))
        while not event.done():
            values.add_(1.0)
        event.synchronize()

    return seconds_of(chain) / (2 * HAND_OVERS)


def _nothing() -> None:
    """Do nothing."""
