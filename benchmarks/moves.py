"""Moves of state of this version and of another one, in turns, beside plain copies of as many bytes.

    python benchmarks/moves.py --before ../other/src --folder /disk --out benchmarks/results/moves.json

`--before` is the `src` folder of another version with its native module built in it. Each version is a process of its
own that has prepared a model; one of them works at a time. What the moves are held against is measured by the same
process right before: copies to and from memory that is mapped, writes and reads of a file from memory that is mapped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEFORE, NOW = "before", "now"
#: A move, what it is held against, and what it is called in the report.
PLAIN = (("down", "offload"), ("up", "reload"), ("write", "offload to nvme"), ("read", "reload from nvme"))
KEPT = (("down", "offload, kept"), ("up", "reload, kept"))
KEPT_NVME = (("write", "offload to nvme, kept"), ("read", "reload from nvme, kept"))


def serve(source: str, folder: str, model: str) -> None:
    """Prepare a model, then do what each line says, and tell milliseconds and those of the processors."""
    if source:  # before what is installed, whose finder would take it otherwise
        sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
        sys.path.insert(0, source)
    import residency
    import step

    device = step.device_of({"threads": len(os.sched_getaffinity(0))})
    optimizer = residency.prepare({"model": model, "folder": folder}, device)
    nbytes = optimizer.locations().bytes(tier="device")
    copies = residency.Copies(nbytes, device, Path(folder, f"copies-{os.getpid()}"))
    turns: dict[str, Callable[[], Any]] = {
        "down": copies.down,
        "up": copies.up,
        "write": copies.to_file,
        "read": copies.from_file,
        "offload": optimizer.offload_states,
        "offload to nvme": lambda: optimizer.offload_states(to="nvme"),
        "offload, kept": lambda: optimizer.offload_states(keep=True),
        "offload to nvme, kept": lambda: optimizer.offload_states(to="nvme", keep=True),
        "give back": lambda: optimizer.offload_states({"grad"}),
    }
    turns |= {name: optimizer.reload_states for _, name in (*PLAIN, *KEPT, *KEPT_NVME) if name.startswith("reload")}
    copies.down()
    copies.to_file()
    print(json.dumps(nbytes), flush=True)
    for line in sys.stdin:
        cpu, start = time.process_time(), time.perf_counter()
        turns[line.strip()]()
        outcome = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3
        print(json.dumps(outcome), flush=True)


class Worker:
    """A process that serves."""

    def __init__(self, source: str, options: argparse.Namespace, folder: str) -> None:
        command = [
            sys.executable,
            __file__,
            "--serve",
            "--before",
            source,
            "--folder",
            folder,
            "--model",
            options.model,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.nbytes = self._read()

    def do(self, what: str) -> Any:
        """One turn."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(workers: dict[str, Worker], rounds: int) -> dict[str, dict[str, list[Any]]]:
    """All rounds: of each version, for each move, what it took and what the plain copy right before it took."""
    found: dict[str, dict[str, list[Any]]] = {version: {} for version in workers}
    for number in range(rounds + 1):
        order = list(workers) if number % 2 else list(reversed(workers))
        for pair in range(0, len(PLAIN), 2):
            for version in order:
                turns(workers[version], PLAIN[pair : pair + 2], found[version] if number else {})
        for moves in (KEPT, KEPT_NVME):
            for _, name in moves:
                workers[NOW].do(name)  # what is kept has to be there
            turns(workers[NOW], moves, found[NOW] if number else {})
        workers[NOW].do("give back")
        workers[NOW].do("reload")
    return found


def turns(worker: Worker, moves: Any, found: dict[str, list[Any]]) -> None:
    """An offload and a reload, each behind what it is held against."""
    for base, name in moves:
        plain = worker.do(base)
        found.setdefault(name, []).append({"move": worker.do(name), "against": plain})


def summary(found: dict[str, dict[str, list[Any]]], nbytes: int) -> dict[str, Any]:
    """Medians of each move, and of the ratios of bandwidths."""
    medians: dict[str, Any] = {}
    for version, row in found.items():
        for name, outcomes in row.items():
            milliseconds = statistics.median(outcome["move"][0] for outcome in outcomes)
            medians[f"{name}, {version}"] = {
                "ms": milliseconds,
                "cpu_ms": statistics.median(outcome["move"][1] for outcome in outcomes),
                "gb_per_second": nbytes / milliseconds / 1e6,
                "of_plain": statistics.median(o["against"][0] / o["move"][0] for o in outcomes),
            }
            if BEFORE in found and version == NOW:
                before = found[BEFORE][name.removesuffix(", kept")]
                ratios = [b["move"][0] / a["move"][0] for a, b in zip(outcomes, before, strict=True)]
                medians[f"{name}, {version}"]["of_before"] = statistics.median(ratios)
    return medians


def main() -> None:
    """Measure, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", help="the src folder of another version")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--model", default="23m", help="100m or 23m parameters, 14 bytes each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.before, options.folder, options.model)
        return
    import machine

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-moves-") as folder:
        workers = {BEFORE: Worker(options.before, options, folder)} if options.before else {}
        workers[NOW] = Worker("", options, folder)
        found = measure(workers, options.rounds)
        for worker in workers.values():
            worker.close()
    report = {"medians": summary(found, workers[NOW].nbytes), "bytes": workers[NOW].nbytes, "rounds": found}
    report |= {"machine": machine.describe(), "load": os.getloadavg(), "model": options.model}
    for name, entry in report["medians"].items():
        print(f"{name:32}" + "".join(f"{key} {value:8.2f}  " for key, value in entry.items()))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
