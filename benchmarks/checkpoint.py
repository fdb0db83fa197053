"""Saving and loading a whole training state against torch.save, torch.distributed.checkpoint and the bare disk.

    python benchmarks/checkpoint.py                     # 355M parameters, 12 bytes each
    python benchmarks/checkpoint.py --placement nvme    # the optimizer's state is in files

One process that takes turns. Everybody has the same bytes, writes a new file and waits until the disk has it (fsync),
then reads it into tensors that are there, with the page cache dropped. `disk` is as many bytes from one buffer to a new
file, and back, past the page cache. Memory is the peak of the process during the turn over what it had before.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import machine
import step
import torch
import torch.distributed.checkpoint as dcp

import penstock
from penstock.runtime.aio import File, Queue
from penstock.runtime.host_memory import page_aligned

CHUNK_BYTES = 32 << 20


def prepare(settings: dict[str, Any], folder: Path, device: torch.device) -> penstock.Optimizer:
    """An engine that has made a step."""
    model = step.build_model(settings["model"], torch.bfloat16)
    given = torch.optim.AdamW(model.parameters(), **contenders.HYPER)
    placement = penstock.Placement(optimizer=settings["placement"], nvme_path=folder)
    optimizer = penstock.prepare(model, given, placement=placement)
    tokens = torch.randint(0, step.MODELS[settings["model"]]["vocab_size"], (1, 32)).to(device)
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def same_bytes(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of a training state of so many bytes: a bf16 parameter, its remainder, two fp32 moments, by layer."""
    numel = CHUNK_BYTES // 8
    state = {}
    for number in range(-(-nbytes // (12 * numel))):
        numel_here = min(numel, nbytes // 12 - number * numel)
        for name, dtype in (("param", torch.bfloat16), ("master", torch.int16), ("m", torch.float), ("v", torch.float)):
            values = torch.randint(-9999, 9999, (numel_here,), dtype=torch.int16)
            state[f"{number}.{name}"] = values.view(dtype) if dtype == torch.bfloat16 else values.to(dtype)
    return state


class Torch:
    """torch.save and torch.load."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path) -> None:
        self._state = state
        self._file = folder / "state.pt"

    def save(self) -> None:
        """To a file, with fsync."""
        with open(self._file, "wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        """Into the tensors that are there."""
        loaded = torch.load(self._file, weights_only=True)
        for name, value in self._state.items():
            value.copy_(loaded.pop(name))


class Distributed:
    """torch.distributed.checkpoint, which syncs its files by itself."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path) -> None:
        self._state = state
        self._folder = folder / "dcp"

    def save(self) -> None:
        """To a folder."""
        dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self._folder, sync_files=True, thread_count=2))

    def load(self) -> None:
        """In place."""
        dcp.load(self._state, storage_reader=dcp.FileSystemReader(self._folder))


class Penstock:
    """This library."""

    def __init__(self, optimizer: penstock.Optimizer, folder: Path) -> None:
        self._optimizer = optimizer
        self._folder = folder / "penstock"

    def save(self) -> None:
        """To a folder."""
        self._optimizer.save(self._folder)

    def load(self) -> None:
        """In place."""
        self._optimizer.load(self._folder)


class Disk:
    """As many bytes, and nothing else."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._count = -(-nbytes // CHUNK_BYTES)
        self._path = folder / "disk"
        self._buffers = [page_aligned(CHUNK_BYTES).fill_(n + 1) for n in range(4)]

    def save(self) -> None:
        """To a new file, with fsync."""
        with Queue(8) as queue, File(queue, self._path, self._count * CHUNK_BYTES) as file:
            self._transfer(lambda offset, buffer: file.write(offset, buffer, checksum=False))
            file.sync()

    def load(self) -> None:
        """Back, into the same buffers."""
        with Queue(8) as queue, File.existing(queue, self._path) as file:
            self._transfer(file.read)

    def _transfer(self, start: Callable[..., Any]) -> None:
        under_way: list[Any] = []
        for n in range(self._count):
            if len(under_way) == len(self._buffers):
                under_way.pop(0).wait()
            under_way.append(start(n * CHUNK_BYTES, self._buffers[n % len(self._buffers)]))
        for transfer in under_way:
            transfer.wait()


def measured(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and bytes of the process at its peak over what it had."""
    machine.restart_peak()
    before = machine.process_bytes("VmRSS")
    started = time.perf_counter()
    work()
    return time.perf_counter() - started, machine.process_bytes("VmHWM") - before


def drop_cache(folder: Path) -> None:
    """Have the files of a folder read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take turns, and compare."""
    device = step.device_of({"threads": arguments.threads})
    settings = {key: getattr(arguments, key) for key in ("model", "placement", "threads", "rounds", "folder")}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        swap, folder = Path(scratch, "swap"), Path(scratch, "saved")
        swap.mkdir()
        folder.mkdir()
        optimizer = prepare(settings, swap, device)
        optimizer.save(folder / "penstock")
        nbytes = sum(path.stat().st_size for path in (folder / "penstock").iterdir())
        shutil.rmtree(folder / "penstock")
        state = same_bytes(nbytes)
        turns: dict[str, Any] = {
            "disk": Disk(nbytes, folder),
            "penstock": Penstock(optimizer, folder),
            "torch.save": Torch(state, folder),
            "dcp": Distributed(state, folder),
        }
        rounds: dict[str, list[tuple[float, int]]] = {}
        for number in range(arguments.rounds + 1):
            for name, contender in turns.items():
                found = {"save": measured(contender.save)}
                drop_cache(folder)
                found["load"] = measured(contender.load)
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                for verb, pair in found.items():
                    if number:
                        rounds.setdefault(f"{verb} {name}", []).append(pair)
        optimizer.close(keep_params=False)
    seconds = {name: statistics.median(s for s, _ in found) for name, found in rounds.items()}
    memory = {name: max(extra for _, extra in found) for name, found in rounds.items()}
    ratios = {
        f"{verb}: {name} / penstock": statistics.median(
            a / b for (a, _), (b, _) in zip(rounds[f"{verb} {name}"], rounds[f"{verb} penstock"], strict=True)
        )
        for verb in ("save", "load")
        for name in turns
        if name != "penstock"
    }
    for name, median in seconds.items():
        print(f"{name:<20}{median:>8.2f} s{nbytes / median / 1e9:>7.2f} GB/s{memory[name] / 2**20:>9.0f} MiB more")
    for name, ratio in ratios.items():
        print(f"{name:<28} {ratio:.2f}")
    return {
        "machine": machine.describe(),
        "settings": settings,
        "bytes": nbytes,
        "seconds": seconds,
        "peak_extra_bytes": memory,
        "time_ratios": ratios,
        "rounds": rounds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=step.MODELS, default="355m")
    parser.add_argument("--placement", choices=("cpu", "nvme"), default="cpu", help="home of the optimizer's state")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
