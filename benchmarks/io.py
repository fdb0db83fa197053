"""The nvme tier's file I/O against fio with O_DIRECT on the same files, before and after, with and without checksums.

python benchmarks/io.py --folder /mnt/nvme/scratch --out benchmarks/results/io.json
python benchmarks/io.py --folder /mnt/nvme/scratch --folders 2        # two folders, of one disk or of two

Every turn moves a part of the working set, the same for all, at a place that is drawn anew. Contenders take turns in an
order that is drawn in every round; ratios are paired by round, with the setting of fio that is best for the pattern.
All read the first file of a folder and write the second. fio's buffers are in huge pages, as penstock's are: in small
ones it reaches half.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import describe

from penstock import Options, _native
from penstock.runtime.aio import CHUNK_BYTES, File, Queue, Transfer, checksum
from penstock.runtime.host_memory import page_aligned

MIB = 1 << 20
PATTERNS = ("read", "write", "half")
#: block size in MiB, depth
FIO = ((1, 32), (4, 16), (8, 8))
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35 and later: large blocks are in huge pages
IN_FLIGHT_BYTES = 160 * MIB  # of penstock's caller, 8 transfers at most
MOST_IN_FLIGHT = 8


@dataclass(frozen=True)
class Engine:
    """How the queues of penstock are set up."""

    name: str
    depth: int
    chunk_bytes: int


ENGINES = (
    Engine("penstock", Options().io_queue_depth, CHUNK_BYTES),
    Engine("before: 1M x 8", 8, MIB),  # what it was until 2026-11-23
)


@dataclass(frozen=True)
class Turn:
    """What everybody moves in a round: `nbytes` of all folders together, from `start` on in each file."""

    pattern: str
    start: int
    nbytes: int


class Files:
    """Two files in each folder: one that is read, of which every MiB is the same, and one that is written."""

    def __init__(self, folders: list[Path], nbytes: int) -> None:
        self.nbytes = nbytes // len(folders) // MIB * MIB
        self.pairs = [(folder / "read", folder / "write") for folder in folders]
        self.content = page_aligned(MIB).random_(0, 256)
        with Queue() as queue:
            for path in (path for pair in self.pairs for path in pair):
                with File(queue, path, self.nbytes) as file:
                    for transfer in [file.write(at, self.content) for at in range(0, self.nbytes, MIB)]:
                        transfer.wait()

    def draw(self, pattern: str, nbytes: int) -> Turn:
        """A turn somewhere in the files."""
        share = nbytes // len(self.pairs)
        return Turn(pattern, random.randrange(0, self.nbytes - share + 1, MIB), nbytes)

    def jobs(self, turn: Turn) -> list[tuple[int, bool, int]]:
        """The folder, whether it is written, and the bytes of every stream of a turn."""
        kinds = {"read": (False,), "write": (True,), "half": (False, True)}[turn.pattern]
        count = len(self.pairs) * len(kinds)
        return [(n, write, turn.nbytes // count // MIB * MIB) for n in range(len(self.pairs)) for write in kinds]


class Penstock:
    """Transfers of one size, their buffers in a ring, so many at once as it has; streams take turns."""

    def __init__(self, engine: Engine, files: Files, ring: torch.Tensor) -> None:
        self.files, self.ring = files, ring
        self.queues = [Queue(engine.depth, chunk_bytes=engine.chunk_bytes) for _ in files.pairs]
        self.opened = [
            tuple(open_to_write(queue, path) for path in pair)
            for queue, pair in zip(self.queues, files.pairs, strict=True)
        ]

    def run(self, turn: Turn, request_bytes: int, checked: bool) -> int:
        """Returns the bytes moved."""
        count = min(MOST_IN_FLIGHT, self.ring.numel() // request_bytes)
        buffers = deque(self.ring[n * request_bytes : (n + 1) * request_bytes] for n in range(count))
        in_flight: deque[Transfer] = deque()
        jobs = self.files.jobs(turn)
        for at in range(0, max(nbytes for *_, nbytes in jobs), request_bytes):
            for folder, write, nbytes in jobs:
                if len(in_flight) == count:
                    in_flight.popleft().wait()
                buffers.rotate(-1)
                buffer, file = buffers[0][: min(request_bytes, nbytes - at)], self.opened[folder][write]
                if write:
                    in_flight.append(file.write(turn.start + at, buffer, checksum=checked))
                else:
                    expected = self.expected(buffer.numel()) if checked else None
                    in_flight.append(file.read(turn.start + at, buffer, checksum=expected))
        while in_flight:
            in_flight.popleft().wait()
        return sum(nbytes for *_, nbytes in jobs)

    def expected(self, nbytes: int, known: dict[int, int] = {}) -> int:  # noqa: B006 - one file content, one table
        """The checksum of so many bytes of the file that is read."""
        if nbytes not in known:
            known[nbytes] = checksum(self.files.content.repeat(nbytes // MIB))
        return known[nbytes]

    def close(self) -> None:
        """Give everything back."""
        for file in (file for pair in self.opened for file in pair):
            file.close()
        for queue in self.queues:
            queue.close()


def open_to_write(queue: Queue, path: Path) -> File:
    """Open a file that is there."""
    file = File.__new__(File)
    file._adopt(queue, str(path), path.stat().st_size, os.open(path, os.O_RDWR | os.O_CLOEXEC), writable=True)
    return file


def cpu_seconds() -> float:
    """Processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], int]) -> dict[str, float]:
    """Bandwidth and processor time of what moves some bytes."""
    cpu, start = cpu_seconds(), time.perf_counter()
    nbytes = work()
    seconds = time.perf_counter() - start
    return {"gb_per_second": nbytes / seconds / 1e9, "cpu_ms_per_gb": (cpu_seconds() - cpu) * 1e12 / nbytes}


def fio(files: Files, turn: Turn, block_mib: int, depth: int, environment: dict[str, str]) -> dict[str, float]:
    """The same by fio, a job for each stream. Its time is that of the job that takes longest, without its start."""
    command = ["fio", "--ioengine=io_uring", f"--bs={block_mib}M", f"--iodepth={depth}", "--direct=1", "--thread"]
    command += ["--output-format=json", "--fallocate=none", "--randrepeat=0", f"--offset={turn.start}"]
    for number, (folder, write, nbytes) in enumerate(files.jobs(turn)):
        command += [f"--name=job{number}", f"--filename={files.pairs[folder][write]}", f"--size={nbytes}"]
        command += [f"--rw={'write' if write else 'read'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(job[kind]["io_bytes"] for job in found for kind in ("read", "write"))
    milliseconds = max(job["job_runtime"] for job in found)
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] for job in found)
    return {"gb_per_second": moved / milliseconds / 1e6, "cpu_ms_per_gb": cpu * 1e9 / moved}


def contenders(
    files: Files, subjects: dict[str, Penstock], requests: list[int]
) -> dict[str, Callable[[Turn], dict[str, float]]]:
    """Everybody, by name."""
    found: dict[str, Callable[[Turn], dict[str, float]]] = {
        f"fio {block}M x {depth}": lambda turn, b=block, d=depth: fio(files, turn, b, d, HUGE) for block, depth in FIO
    }
    found["small pages: fio 1M x 32"] = lambda turn: fio(files, turn, 1, 32, {})
    for name, subject in subjects.items():
        for mib in requests:
            for checked in (False, True):
                found[f"{name}, transfers of {mib}M{', checksums' if checked else ''}"] = (
                    lambda turn, s=subject, n=mib * MIB, c=checked: timed(lambda: s.run(turn, n, c))
                )
    return found


def measure(folders: list[Path], options: argparse.Namespace, requests: list[int]) -> dict[str, Any]:
    """All rounds, by pattern and contender."""
    files = Files(folders, options.size * MIB)
    ring = page_aligned(IN_FLIGHT_BYTES).random_(0, 256)
    subjects = {engine.name: Penstock(engine, files, ring) for engine in ENGINES}
    everybody = contenders(files, subjects, requests)
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(options.rounds + 1):
        for pattern in PATTERNS:
            turn = files.draw(pattern, options.turn * MIB)
            for name in random.sample(list(everybody), len(everybody)):
                outcome = everybody[name](turn)
                if number:  # the first round fills caches of all kinds
                    figures.setdefault(pattern, {}).setdefault(name, []).append(outcome)
    for subject in subjects.values():
        subject.close()
    return figures


def checksum_speeds() -> dict[str, dict[str, float]]:
    """GB/s of CRC-32C on one core, in processor time, by the ways that the processor has; all take turns."""
    memory = page_aligned(64 * MIB).random_(0, 256)
    rounds: dict[str, dict[str, list[float]]] = {}
    for _ in range(9):
        for way in _native.crc32c_ways():
            for place, nbytes in (("in the cache", MIB // 4), ("from memory", memory.numel())):
                if way == "portable":
                    nbytes = min(nbytes, 4 * MIB)
                start, count = time.thread_time(), max(1, 16 * MIB // nbytes)
                for _ in range(count):
                    _native.crc32c_by(way, memory.data_ptr(), nbytes)
                speed = count * nbytes / (time.thread_time() - start) / 1e9
                rounds.setdefault(way, {}).setdefault(place, []).append(speed)
    return {way: {place: statistics.median(of) for place, of in found.items()} for way, found in rounds.items()}


def summary(figures: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Medians, and the medians of the ratios by round to fio's best setting and to the engine as it was before."""
    medians: dict[str, Any] = {}
    for pattern, row in figures.items():
        speed = {name: [outcome["gb_per_second"] for outcome in found] for name, found in row.items()}
        best = max((name for name in row if name.startswith("fio")), key=lambda name: statistics.median(speed[name]))
        medians[pattern] = {"best of fio": best}
        for name, found in row.items():
            entry = {key: statistics.median(outcome[key] for outcome in found) for key in found[0]}
            others = {"to_best_fio": best, "to_before": name.replace(ENGINES[0].name, ENGINES[1].name)}
            for ratio, other in others.items():
                if other != name:
                    entry[ratio] = statistics.median(a / b for a, b in zip(speed[name], speed[other], strict=True))
            medians[pattern][name] = entry
    return medians


def print_table(medians: dict[str, Any]) -> None:
    """The medians, for people."""
    for pattern, row in medians.items():
        print(f"{pattern} (best of fio: {row['best of fio']})")
        for name, entry in sorted(row.items()):
            if name != "best of fio":
                print(f"  {name:44}" + "".join(f"{key} {value:7.2f}  " for key, value in entry.items()))


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--folders", type=int, default=1, help="how many folders, made in --folder")
    parser.add_argument("--size", type=int, default=1024, help="the working set, MiB, of all folders")
    parser.add_argument("--turn", type=int, default=240, help="how much of it a turn moves, MiB")
    parser.add_argument("--requests", default="8,20", help="bytes of a transfer, MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    options = parser.parse_args()
    requests = [int(size) for size in options.requests.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-io-") as name:
        folders = [Path(name, str(number)) for number in range(options.folders)]
        for folder in folders:
            folder.mkdir()
        figures = measure(folders, options, requests)
    report = {"medians": summary(figures), "rounds": figures, "engines": [asdict(engine) for engine in ENGINES]}
    report |= {
        "checksums, GB/s": checksum_speeds(),
        "settings": {key: str(value) for key, value in vars(options).items()},
        "machine": describe(),
    }
    print_table(report["medians"])
    print(report["checksums, GB/s"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
