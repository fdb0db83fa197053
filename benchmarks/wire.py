"""Wire formats on the host: what packing and unpacking takes, beside what memory allows.

    python benchmarks/wire.py --numel 100e6 --threads 1 2 --rounds 7

Measured as benchmarks/rules.py measures updates: each row's bound is a C program that reads and writes the same bytes
with hardly any arithmetic (bound.c), timed in the same round. What is written counts twice, as it is read into the
cache first. `unpack + add` sums into fp32; all else is of bf16 values.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from rules import HERE, Row, bound_of, compile_bound


def contenders(numel: int, threads: int) -> dict[str, Row]:
    """Rows by name."""
    import torch

    from penstock.rules import Pool
    from penstock.rules.wire import WireFormat, WireName

    torch.manual_seed(0)
    pool = Pool(threads)
    values, sums = torch.randn(numel).mul_(0.02).bfloat16(), torch.zeros(numel)
    names: list[WireName] = ["int8", "fp8", "int4"]
    rows: dict[str, Row] = {}
    for name in names:
        form = WireFormat(name)
        packed = torch.empty(form.packed_bytes(numel), dtype=torch.uint8)
        form.pack(values, packed, pool)
        # Values are unpacked into what they were packed from: it stays what it is but for its last bits.
        rows[f"{name} pack"] = Row(lambda f=form, p=packed: f.pack(values, p, pool), [packed], [values])
        rows[f"{name} unpack"] = Row(lambda f=form, p=packed: f.unpack(p, values, pool), [values], [packed])
        rows[f"{name} unpack + add"] = Row(lambda f=form, p=packed: f.unpack(p, sums, pool, add=True), [sums], [packed])
    return rows


def measure(numel: int, threads: int, rounds: int, library: Any) -> dict[str, Any]:
    figures = {}
    for name, row in contenders(numel, threads).items():
        for turn in range(rounds + 1):
            for what, seconds in ((bound_of(library, row, threads), row.bound_seconds), (row.run, row.seconds)):
                start = time.perf_counter()
                what()
                if turn > 0:
                    seconds.append(time.perf_counter() - start)
            row.run()  # the bound's writes have left codes that are none
        median = statistics.median(row.seconds)
        figures[name] = {
            "ns_per_value": round(median / numel * 1e9, 4),
            "gigabytes_per_second": round(row.nbytes / median / 1e9, 2),
            "least_of_bound": round(min(row.bound_seconds) / min(row.seconds), 3),
            "of_bound": round(statistics.median(b / s for b, s in zip(row.bound_seconds, row.seconds, strict=True)), 3),
        }
        print(f"{name:24}", *(f"{key} {value:8.3f}" for key, value in figures[name].items()), flush=True)
    return {"numel": numel, "threads": threads, "rounds": rounds, "rows": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, nargs="+", default=[100e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "wire.json")
    arguments = parser.parse_args()
    import machine

    from penstock import _native

    library, load_before, runs = compile_bound(), os.getloadavg()[0], []
    for size in arguments.numel:
        numel = int(size) // 1024 * 1024
        for threads in arguments.threads:
            print(f"{numel / 1e6:.0f}M values, {threads} threads, {_native.isa()}", flush=True)
            runs.append(measure(numel, threads, arguments.rounds, library))
    found = {"machine": machine.describe(), "isa": _native.isa(), "load_before": load_before, "runs": runs}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
