"""The nvme tier's file I/O against fio with O_DIRECT on the same disk, and what checksums cost.

python benchmarks/io.py --folder /mnt/nvme/scratch --out benchmarks/results/io.json

Contenders take turns within every round, fio in several settings; ratios are paired by round with fio's best setting of
that pattern. Files are preallocated and written once before the clock starts, except in `first write`.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

from penstock.machine.aio import CHUNK_BYTES, File, Queue, Transfer
from penstock.machine.arena import Arena

MIB = 1 << 20
PATTERNS = ("read", "write", "half")
#: engine, block size in MiB, depth
FIO = (("io_uring", 1, 32), ("io_uring", 8, 8), ("libaio", 8, 8))
IN_FLIGHT = 8  # requests of penstock's caller


class Penstock:
    """Requests of one size over a file, from a ring of page-aligned buffers, `IN_FLIGHT` at once."""

    def __init__(self, folder: Path, nbytes: int, request_bytes: int, depth: int) -> None:
        self.queue = Queue(depth)
        self.file = File(self.queue, folder / f"penstock-{request_bytes}-{depth}", nbytes)
        arena = Arena(IN_FLIGHT * request_bytes, torch.device("cpu"))
        self.buffers = [arena.lease(request_bytes, torch.uint8).random_(0, 256) for _ in range(IN_FLIGHT)]
        self.offsets = range(0, nbytes - request_bytes + 1, request_bytes)
        self.checksums: list[int | None] = [None] * len(self.offsets)
        self.run("write", False)

    def run(self, pattern: str, checked: bool) -> int:
        """Move the file once; returns the bytes moved. In `half`, the halves of the file are read and written."""
        in_flight: deque[tuple[int, Transfer]] = deque()
        half = len(self.offsets) // 2
        for turn in range(2 * half):
            index, write = turn, pattern == "write"
            if pattern == "half":
                index, write = turn // 2 + (turn % 2) * half, bool(turn % 2)
            if len(in_flight) == IN_FLIGHT:
                self.end(*in_flight.popleft())
            buffer = self.buffers[turn % len(self.buffers)]
            offset = self.offsets[index]
            if write:
                self.checksums[index] = None
                in_flight.append((index, self.file.write(offset, buffer, checksum=checked)))
            else:
                expected = self.checksums[index] if checked else None
                in_flight.append((-1, self.file.read(offset, buffer, checksum=expected)))
        while in_flight:
            self.end(*in_flight.popleft())
        return 2 * half * self.buffers[0].nbytes

    def end(self, index: int, transfer: Transfer) -> None:
        transfer.wait()
        if index >= 0:
            self.checksums[index] = transfer.checksum or None

    def close(self) -> None:
        self.file.close()
        self.queue.close()
        Path(self.file.path).unlink()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], int]) -> dict[str, float]:
    cpu, start = cpu_seconds(), time.perf_counter()
    nbytes = work()
    seconds = time.perf_counter() - start
    return {"gb_per_second": nbytes / seconds / 1e9, "cpu_ms_per_gb": (cpu_seconds() - cpu) * 1e12 / nbytes}


def fio(folder: Path, pattern: str, nbytes: int, engine: str, block_mib: int, depth: int) -> dict[str, float]:
    """Move as much as penstock does, sequentially: in `half` one job reads one file while another writes a second."""
    command = ["fio", f"--ioengine={engine}", f"--bs={block_mib}M", f"--iodepth={depth}", "--direct=1"]
    command += ["--output-format=json", "--fallocate=none", "--randrepeat=0"]
    if pattern == "half":
        jobs = [("read", "fio-a", nbytes // 2), ("write", "fio-b", nbytes // 2)]
    else:
        jobs = [(pattern, "fio-a", nbytes)]
    for kind, name, size in jobs:
        command += [f"--name={kind}", f"--filename={folder / name}", f"--rw={kind}", f"--size={size}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(job[job["jobname"]]["io_bytes"] for job in found)
    milliseconds = max(job[job["jobname"]]["runtime"] for job in found)
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job[job["jobname"]]["runtime"] for job in found)
    return {"gb_per_second": moved / milliseconds / 1e6, "cpu_ms_per_gb": cpu * 1e9 / moved}


def first_write(folder: Path, nbytes: int, depth: int) -> dict[str, float]:
    """Into a file that was allocated and never written."""
    source = Arena(8 * MIB, torch.device("cpu")).lease(8 * MIB, torch.uint8).fill_(1)
    with Queue(depth) as queue, File(queue, folder / "fresh", nbytes) as file:

        def work() -> int:
            for transfer in [file.write(at, source, checksum=False) for at in range(0, nbytes, source.nbytes)]:
                transfer.wait()
            return nbytes

        figures = timed(work)
    (folder / "fresh").unlink()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--sizes", default="64,256,1024", help="working sets, MiB")
    parser.add_argument("--requests", default="1,8,20", help="bytes of a transfer, MiB")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    requests = [int(size) for size in options.requests.split(",")]
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-io-") as name:
        folder = Path(name)
        for size in map(int, options.sizes.split(",")):
            nbytes = size * MIB
            for label in ("fio-a", "fio-b"):
                fio(folder, "write", nbytes, "libaio", 8, 8)
                if label == "fio-a":
                    os.replace(folder / "fio-a", folder / "fio-b")
            contenders = {request: Penstock(folder, nbytes, request * MIB, options.depth) for request in requests}
            for turn in range(options.rounds + 1):
                for pattern in PATTERNS:
                    row = figures.setdefault(f"{size} MiB, {pattern}", {})
                    turns: dict[str, Callable[[], dict[str, float]]] = {}
                    for engine, block, depth in FIO:
                        turns[f"fio {engine} {block}M x {depth}"] = (
                            lambda p=pattern, n=nbytes, e=engine, b=block, d=depth: fio(folder, p, n, e, b, d)
                        )
                    for request, subject in contenders.items():
                        for checked in (False, True):
                            label = f"penstock {request}M{', checksums' if checked else ''}"
                            turns[label] = lambda s=subject, p=pattern, c=checked: timed(lambda: s.run(p, c))
                    if pattern == "write":
                        turns["penstock 8M, first write"] = lambda n=nbytes: first_write(folder, n, options.depth)
                    for label, work in turns.items():
                        found = work()
                        if turn:
                            row.setdefault(label, []).append(found)
            for subject in contenders.values():
                subject.close()
            for path in folder.iterdir():
                path.unlink()
    report = summary(figures)
    report["settings"] = {"depth": options.depth, "chunk_bytes": CHUNK_BYTES, "in_flight": IN_FLIGHT}
    report["settings"]["rounds"] = options.rounds
    report["machine"] = describe()
    print_table(report["medians"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def summary(figures: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Medians of every contender, and their paired ratios to fio's best setting and to the same without checksums."""
    medians: dict[str, Any] = {}
    for pattern, row in figures.items():
        speed = {label: [f["gb_per_second"] for f in found] for label, found in row.items()}
        best = max(
            (label for label in row if label.startswith("fio")), key=lambda label: statistics.median(speed[label])
        )
        medians[pattern] = {"best of fio": best}
        for label, found in row.items():
            entry = {key: statistics.median(f[key] for f in found) for key in found[0]}
            entry["to_best_fio"] = statistics.median(a / b for a, b in zip(speed[label], speed[best], strict=True))
            if label.endswith(", checksums"):
                plain = speed[label.removesuffix(", checksums")]
                entry["to_unchecked"] = statistics.median(a / b for a, b in zip(speed[label], plain, strict=True))
            medians[pattern][label] = entry
    return {"medians": medians, "rounds": figures}


def print_table(medians: dict[str, Any]) -> None:
    for pattern, row in medians.items():
        print(f"{pattern} (best of fio: {row['best of fio']})")
        for label, entry in row.items():
            if label != "best of fio":
                print(f"  {label:32}" + "".join(f"{key} {value:8.3f}  " for key, value in entry.items()))


if __name__ == "__main__":
    main()
