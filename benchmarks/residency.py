"""Offload and reload of a whole training state against plain copies of the same bytes.

    python benchmarks/residency.py                      # 100M parameters, 14 bytes each
    python benchmarks/residency.py --folder /disk       # where the files of the nvme tier are
    python benchmarks/residency.py --plot docs/moves.svg

One process that takes turns: each round copies the bytes with torch's own copy into memory that is mapped already and
into memory that is mapped for it, and then moves the state there and back. `device` is the accelerator; on a cpu as the
device it is a second kind of host memory (`Separate`), so that every byte is copied as to an accelerator.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import machine
import step
import torch

import penstock
from penstock import preparing
from penstock.runtime.accelerator import streams_for
from penstock.runtime.aio import File, Queue
from penstock.runtime.host_memory import Arena
from penstock.runtime.streams import InlineStreams, Streams

CHUNK_BYTES = 64 << 20
step.MODELS["23m"] = {**step.MODELS["355m"], "num_hidden_layers": 1, "vocab_size": 6000}


class Separate(InlineStreams):
    """A cpu as the device, whose memory is taken for another one than the host's."""

    aliases_host = False


def make_streams(device: torch.device, *, debug_release: bool = False) -> Streams:
    """The streams of an accelerator, or of what stands for one."""
    return Separate(device) if device.type == "cpu" else streams_for(device, debug_release=debug_release)


def prepare(settings: dict[str, Any], device: torch.device) -> penstock.Optimizer:
    """A model on the device, with gradients."""
    preparing.streams_for = make_streams  # type: ignore[assignment]
    model = step.build_model(settings["model"], torch.bfloat16)
    given = torch.optim.AdamW(model.parameters(), **contenders.HYPER)
    placement = penstock.Placement(nvme_path=settings["folder"])
    optimizer = penstock.prepare(model, given, placement=placement)
    tokens = torch.randint(0, step.MODELS[settings["model"]]["vocab_size"], (1, 32)).to(device)
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    return optimizer


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds until the work is done."""
    started = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3


class Copies:
    """The limits: as many bytes from device memory to host memory and back, and to a file and back."""

    def __init__(self, nbytes: int, device: torch.device, folder: Path) -> None:
        self._count = -(-nbytes // CHUNK_BYTES)
        self._device = device
        self._near = [torch.ones(CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._arena = self._map()
        self._file = File(Queue(8), folder, self._count * CHUNK_BYTES)
        self._buffers = [self._arena[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES] for n in range(4)]

    def _map(self) -> torch.Tensor:
        return Arena(self._count * CHUNK_BYTES, self._device).allocate(self._count * CHUNK_BYTES, torch.uint8)

    def down(self, host: torch.Tensor | None = None) -> None:
        """Device to memory that is mapped."""
        host = self._arena if host is None else host
        for n in range(self._count):
            host[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES].copy_(self._near[n % 2], non_blocking=True)

    def down_and_map(self) -> None:
        """Device to memory that is mapped for it."""
        self.down(self._map())

    def up(self) -> None:
        """Host to memory of the device that is there."""
        for n in range(self._count):
            self._near[n % 2].copy_(self._arena[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES], non_blocking=True)

    def up_and_make(self) -> None:
        """Host to memory of the device that is made for it."""
        made = []
        for n in range(self._count):
            made.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self._device))
            made[-1].copy_(self._arena[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES], non_blocking=True)

    def to_file(self) -> None:
        """Host to a file."""
        self._transfer(self._file.write)

    def from_file(self) -> None:
        """A file to host memory that is mapped."""
        self._transfer(self._file.read)

    def _transfer(self, start: Callable[..., Any]) -> None:
        under_way = [start(n * CHUNK_BYTES, self._buffers[n]) for n in range(min(4, self._count))]
        for n in range(4, self._count):
            under_way[n % 4].wait()
            under_way[n % 4] = start(n * CHUNK_BYTES, self._buffers[n % 4])
        for transfer in under_way:
            transfer.wait()


class Watch:
    """Bytes of a process and of its tiers, sampled on a thread."""

    def __init__(self, optimizer: penstock.Optimizer) -> None:
        self._optimizer = optimizer
        self._started = time.perf_counter()
        self.samples: list[dict[str, float]] = []
        self.marks: list[tuple[float, str]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def mark(self, name: str) -> None:
        """What begins now."""
        self.marks.append((time.perf_counter() - self._started, name))

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            report = self._optimizer.locations()
            tiers = {tier: float(report.bytes(tier=tier)) for tier in ("device", "cpu", "nvme")}
            seconds = time.perf_counter() - self._started
            self.samples.append(tiers | {"seconds": seconds, "process": machine.process_bytes("VmRSS")})

    def end(self) -> None:
        """No more samples."""
        self._ended.set()
        self._thread.join()


COLOURS = {"process": "#888888", "device": "#d1495b", "cpu": "#30638e", "nvme": "#5f8d4e"}


def plot(watch: Watch) -> str:
    """The samples as a drawing."""
    width, height, left, top = 760, 300, 60, 30
    last = watch.samples[-1]["seconds"]
    most = max(max(s[name] for name in COLOURS) for s in watch.samples) * 1.05

    def place(seconds: float, nbytes: float) -> str:
        return (
            f"{left + seconds / last * (width - left - 10):.1f},{top + (1 - nbytes / most) * (height - top - 40):.1f}"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for gib in range(int(most / 2**30) + 1):
        x, y = place(0, gib * 2**30).split(",")
        parts.append(
            f'<path d="M{x},{y} H{width - 10}" stroke="#eeeeee"/><text x="{left - 40}" y="{y}">{gib} GiB</text>'
        )
    for number, (seconds, name) in enumerate(watch.marks):
        x, y = place(seconds, 0).split(",")
        label = f'<text x="{float(x) + 3}" y="{height - 26 + number % 2 * 14}">{name}</text>'
        parts.append(f'<path d="M{x},{top} V{y}" stroke="#bbbbbb" stroke-dasharray="3"/>{label}')
    for number, (name, colour) in enumerate(COLOURS.items()):
        points = " ".join(place(s["seconds"], s[name]) for s in watch.samples)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{left + 120 * number}" y="18" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw(optimizer: penstock.Optimizer) -> str:
    """Away and back on both tiers, with pauses."""
    watch = Watch(optimizer)
    for name, move in (
        ("at home", lambda: None),
        ("offload to cpu", optimizer.offload_states),
        ("reload", optimizer.reload_states),
        ("offload to nvme", lambda: optimizer.offload_states(to="nvme")),
        ("reload", optimizer.reload_states),
    ):
        watch.mark(name)
        move()
        time.sleep(0.4)
    watch.end()
    return plot(watch)


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take turns, and compare."""
    device = step.device_of({"threads": arguments.threads})
    settings = {key: getattr(arguments, key) for key in ("model", "threads", "rounds", "folder")}
    optimizer = prepare(settings, device)
    nbytes = optimizer.locations().bytes(tier="device")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        copies = Copies(nbytes, device, Path(folder, "copies"))
        if arguments.plot:
            arguments.plot.write_text(draw(optimizer))
        turns: dict[str, Callable[[], Any]] = {
            "copy down": copies.down,
            "copy down, mapped for it": copies.down_and_map,
            "offload to cpu": optimizer.offload_states,
            "copy up": copies.up,
            "copy up, made for it": copies.up_and_make,
            "reload from cpu": optimizer.reload_states,
        }
        if arguments.nvme:
            turns |= {
                "write": copies.to_file,
                "offload to nvme": lambda: optimizer.offload_states(to="nvme"),
                "read": copies.from_file,
                "reload from nvme": optimizer.reload_states,
            }
        # What follows keeps memory and files, and the last turn gives them back.
        turns |= {
            "first offload to cpu, kept": lambda: optimizer.offload_states(keep=True),
            "reload, to be kept": optimizer.reload_states,
            "copy down again": copies.down,
            "offload to cpu, kept": lambda: optimizer.offload_states(keep=True),
            "copy up again": copies.up,
            "reload from cpu, kept": optimizer.reload_states,
        }
        if arguments.nvme:
            turns |= {
                "first offload to nvme, kept": lambda: optimizer.offload_states(to="nvme", keep=True),
                "reload from nvme, to be kept": optimizer.reload_states,
                "write again": copies.to_file,
                "offload to nvme, kept": lambda: optimizer.offload_states(to="nvme", keep=True),
                "read again": copies.from_file,
                "reload from nvme, kept": optimizer.reload_states,
            }
        turns["give back"] = lambda: (optimizer.offload_states({"grad"}), optimizer.reload_states())
        rounds: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(arguments.rounds + 1):
            for name, work in turns.items():
                milliseconds = timed(work, device)
                if number:
                    rounds[name].append(milliseconds)
    pairs = {
        "offload to cpu": ("copy down", "copy down, mapped for it"),
        "reload from cpu": ("copy up", "copy up, made for it"),
        "offload to nvme": ("write",),
        "reload from nvme": ("read",),
        "offload to cpu, kept": ("copy down again",),
        "reload from cpu, kept": ("copy up again",),
        "offload to nvme, kept": ("write again",),
        "reload from nvme, kept": ("read again",),
    }
    ratios = {
        f"{name} / {base}": statistics.median(b / a for a, b in zip(rounds[name], rounds[base], strict=True))
        for name, bases in pairs.items()
        if name in rounds
        for base in bases
    }
    for name, found in rounds.items():
        milliseconds = statistics.median(found)
        print(f"{name:<28}{milliseconds:>9.0f} ms{nbytes / milliseconds / 1e6:>8.2f} GB/s")
    for name, ratio in ratios.items():
        print(f"{name:<52} {ratio:.2f} of its bandwidth")
    return {
        "machine": machine.describe(),
        "settings": settings,
        "bytes": nbytes,
        "medians": {name: statistics.median(found) for name, found in rounds.items()},
        "bandwidth_ratios": ratios,
        "rounds": rounds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=step.MODELS, default="100m")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--nvme", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="draw memory over time as SVG")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
