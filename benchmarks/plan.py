"""How far the planner is off, and what it takes: each part by itself.

    python benchmarks/plan.py strict          # modelled time of the strict device: exact, also on a noisy machine
    python benchmarks/plan.py grid            # `auto` against the best of a grid, in the same time
    python benchmarks/plan.py simulated       # the clock, on streams that sleep as long as their bytes take
    python benchmarks/plan.py simulated_grid  # `auto` against the best of a grid, on those streams
    python benchmarks/plan.py small           # the clock, with 23M parameters on a cpu, after a fresh probe
    python benchmarks/plan.py cpu             # the clock, with 355M parameters on a cpu, in memory and in files
    python benchmarks/plan.py ranks           # the clock, with 2 and 4 ranks of this machine
    python benchmarks/plan.py planning        # seconds and memory of planning 8B and 70B
    python benchmarks/plan.py scale           # curves: GPUs, disks, memory of the host
    python benchmarks/plan.py cases           # the search against placements that a linear programme found
    python benchmarks/plan.py meshes          # curves to 1,024 GPUs, by mesh: seconds, bytes on links and network

Rows have the predicted and the measured seconds of a step; `benchmarks/results/plan-*.json` keeps them. Those by the
clock also go to `penstock/planner/residuals.json`, which the range of a plan's step comes from.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `penstock train` has it; torch reads it when it is loaded

import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the strict device is one of the tests
PARTS = {
    "strict": "strict",
    "grid": "strict",
    "simulated": "simulated",
    "simulated_grid": "simulated",
    "small": "here",
    "cpu": "here",
    "ranks": "here",
    "scale": "scale",
    "cases": "cases",
    "meshes": "meshes",
}
#: Parts whose rows are by the clock, and the device that they are of in `penstock/planner/residuals.json`.
RESIDUALS = {"small": "cpu", "cpu": "cpu", "ranks": "cpu", "simulated": "simulated"}


def planning() -> dict[str, Any]:
    """A process for each model: a peak is a process's."""
    from planning import scale

    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {"rows": [pool.apply(scale.planning, case) for case in scale.CASES]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "planning"))
    part = parser.parse_args().part
    found = planning() if part == "planning" else getattr(importlib.import_module(f"planning.{PARTS[part]}"), part)()
    told = {"machine": machine.describe(), "part": part, **found}
    if part in RESIDUALS:
        importlib.import_module("planning.rows").remember(found["rows"], RESIDUALS[part])
    (HERE / "results" / f"plan-{part}.json").write_text(json.dumps(told, indent=1) + "\n")
    print({name: value for name, value in found.items() if name != "rows"})


if __name__ == "__main__":
    main()
