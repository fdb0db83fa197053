"""What a rank does and holds, by the number of ranks: start, prepare, a step, save and load, on a cpu with gloo.

    python benchmarks/growth.py                   # worlds of 1, 2, 4 and 8 processes on this machine
    python benchmarks/growth.py --worlds 1 2

The model is the same for all, so shards get smaller. Of each phase: seconds of the processor (the clock says little
where ranks are more than cores), bytes read and written, memory that came with it, threads, descriptors, collectives.
Each is fitted as `of the world + by rank * ranks`: what grows by rank is what a thousand ranks would feel.
`benchmarks/results/growth.json` keeps all of it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
BLOCKS, WIDTH = 24, 256
NOTED = ("processor_s", "read_bytes", "written_bytes", "resident_bytes", "threads", "descriptors", "collectives")


def now() -> dict[str, float]:
    """Everything that is counted, of this process so far."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "seconds": time.perf_counter(),
        "processor_s": used.ru_utime + used.ru_stime,
        "read_bytes": float(io["rchar"]),
        "written_bytes": float(io["wchar"]),
        "resident_bytes": float(pages * resource.getpagesize()),
        "threads": float(len(os.listdir("/proc/self/task"))),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
    }


def rank_of(folder: str, world: int, rank: int) -> None:
    """Do everything once, as one rank."""
    phases: dict[str, dict[str, float]] = {}
    counts: Any = None

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before, issued = now(), sum(counts.values()) if counts is not None else 0
        yield
        after = now()
        phases[name] = {key: after[key] - before[key] for key in after}
        phases[name]["collectives"] = float((sum(counts.values()) if counts is not None else 0) - issued)

    with phase("import"):
        import torch
        import torch.distributed as dist

        import penstock
    torch.set_num_threads(1)
    with phase("groups"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        dist.barrier()
    with phase("prepare"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        stock = torch.optim.AdamW(model.parameters())
        optimizer = penstock.prepare(model, stock, placement=penstock.Placement(optimizer="cpu"))
    counts = optimizer._engine.context.ranks.counts
    phases["prepare"]["collectives"] = float(sum(counts.values()))
    for name in ("first step", "step"):
        with phase(name):
            optimizer.backward(model(torch.ones(4, WIDTH)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    with phase("save"):
        optimizer.save(f"{folder}/checkpoint")
    with phase("load"):
        optimizer.load(f"{folder}/checkpoint")
    with phase("close"):
        optimizer.close(keep_params=False)
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(phases))


def world_of(world: int) -> dict[str, dict[str, float]]:
    """Run so many ranks, and take the mean of them."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(world):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            environment = {name: str(value) for name, value in told.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, __file__, "--rank", str(rank), "--worlds", str(world), "--folder", folder]
            running.append(subprocess.Popen(command, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}))
        if any([process.wait() for process in running]):
            raise SystemExit(f"a rank of {world} failed")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
        files = [file for file in Path(folder, "checkpoint").rglob("*") if file.is_file()]
        found = {name: {key: fmean(each[name][key] for each in ranks) for key in ranks[0][name]} for name in ranks[0]}
        stored = {"files": float(len(files)), "bytes": float(sum(file.stat().st_size for file in files))}
        return found | {"checkpoint": stored}


def fit(points: list[tuple[float, float]]) -> dict[str, float]:
    """Fit a line by least squares."""
    x, y = (fmean(values) for values in zip(*points, strict=True))
    spread = sum((each - x) ** 2 for each, _ in points)
    slope = sum((a - x) * (b - y) for a, b in points) / spread if spread else 0.0
    return {"of_the_world": y - slope * x, "by_rank": slope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", default=str(HERE / "results" / "growth.json"))
    given = parser.parse_args()
    if given.rank is not None:
        rank_of(given.folder, given.worlds[0], given.rank)
        return
    import machine

    worlds = {world: world_of(world) for world in given.worlds}
    several = [world for world in worlds if world > 1]  # one rank alone has no groups
    fits = {
        phase: {key: fit([(world, worlds[world][phase][key]) for world in several]) for key in NOTED}
        for phase in worlds[given.worlds[0]]
        if phase != "checkpoint"
    }
    told = {"machine": machine.describe(), "blocks": BLOCKS, "width": WIDTH, "worlds": worlds, "fits": fits}
    Path(given.out).write_text(json.dumps(told, indent=1) + "\n")
    for phase, keys in fits.items():
        words = ", ".join(f"{key} {each['of_the_world']:.4g} {each['by_rank']:+.3g} W" for key, each in keys.items())
        print(f"{phase}: {words}")


if __name__ == "__main__":
    main()
