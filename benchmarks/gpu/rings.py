"""What the planner's paper says of rows that were measured on an H100, with the rings of then and those of now.

    python benchmarks/gpu/rings.py benchmarks/results/gpu/h100-2026-11

Reads the reports of a folder, simulates their rows, and writes `rings.json` there. No accelerator is needed.
A row was measured in rounds of a few steps that end once all is done, so it is predicted in the same way.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
from predict import work_of

from penstock import Placement
from penstock.planner import Machine
from penstock.planner.cost import MachineCosts
from penstock.planner.plan_request import made, plan_request
from penstock.planner.rates import Rate
from penstock.planner.search import given
from penstock.planner.simulation.fair_share import Demand, total_loads
from penstock.planner.simulation.program import Program, WorkKind
from penstock.planner.simulation.retime import retime
from penstock.planner.simulation.simulate import Setup
from penstock.planner.trials import Trials
from penstock.tiers import staging, transfer

DEVICE = {"params": "device", "grads": "device", "optimizer": "device"}
ALL_CPU = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
#: What a probe of that day did not measure, or measured wrong, from `h100-server`; the link as `check.json` has it.
FITTED = ("device_bandwidth", "device_update", "update", "wake_seconds")
LINK = {"h2d": 54e9, "d2h": 54e9, "duplex": 86e9}
WAKES = (10e-6, 100e-6, 300e-6, 600e-6)
OF_UPDATES = ("update", "upload", "download")


@contextmanager
def rings_of_tiles() -> Iterator[None]:
    """Have slots of a tile each, and updates of a tile each on the host, as they were when the rows were measured."""
    with patch.object(staging, "STRETCH_NUMEL", 0), patch.object(transfer, "STRETCH_NUMEL", 0):
        yield


def program(shape: str, placement: Mapping[str, str], machine: Machine) -> Program:
    """Simulate two steps of 4 sequences of 4,096 tokens, clipped, with layers recomputed."""
    # With a vocabulary of 128,256 words the logits would not fit.
    model, batch = work_of(shape, (4, 4096), recompute=True, chunked_loss=shape.startswith("llama"))
    request = plan_request(
        Setup(made(model), torch.optim.AdamW, batch, hosts=1),
        machine=machine,
        arguments={"max_grad_norm": 1.0, "overlap": "forward"},
    )
    placed = Placement(**placement)  # type: ignore[arg-type] # of names of tiers
    return given(request, Trials(request), placed).trial.simulation.program


def round_seconds(program: Program, costs: MachineCosts, steps: int) -> float:
    """Give the seconds of a step of a round that begins with nothing under way, and ends once all is done."""
    timing = retime(program, costs)
    return (timing.recording.stop + (steps - 2) * timing.steps_s[-1]) / steps


def update_seconds(program: Program, costs: MachineCosts) -> tuple[float, float]:
    """Give what the last step's update takes, which nothing hides, and what its traffic takes."""
    timing = retime(program, costs)
    jobs = [program.jobs[item.index] for item in program.items if item.kind is WorkKind.SUBMIT]
    last = len([item for item in program.items[: program.steps[-2]] if item.kind is WorkKind.SUBMIT])
    own = [n for n in range(last, len(jobs)) if jobs[n].label.verb in ("update", "publish")]
    spans = [timing.recording.spans[n] for n in own]
    demands: list[Demand] = [costs.job(jobs[n], program) for n in own if jobs[n].stream in OF_UPDATES]
    return max(span.stop for span in spans) - min(span.start for span in spans), max(total_loads(demands).values())


def measured_rows(folder: Path) -> Iterator[tuple[str, str, Mapping[str, str], list[float], int]]:
    """Read what was measured: of each row a name, the shape, the placement, seconds of a step of each round, steps."""
    for name in ("bench1.json", "bench2.json"):
        report = json.loads((folder / name).read_text())
        settings = report["settings"]
        for row in report["rows"]:
            seconds = [ms / 1000 for ms in row.get("round_step_ms") or []]
            placement = DEVICE if row["name"] == "plain" else row.get("options", {}).get("placement")
            if seconds and placement and row["setup"] in ("plain", "penstock"):
                placement = {kind: placement.get(kind, "device") for kind in DEVICE}
                yield row["name"], settings["shape"], placement, seconds, settings["steps"]
    report = json.loads((folder / "8b.json").read_text())
    for row in report["rows"]:
        seconds, steps = [ms / 1000 for ms in row["round_step_ms"]], report["settings"]["steps"]
        for count in sorted(set(steps)) if row["options"] else ():
            of_count = [each for each, n in zip(seconds, steps, strict=True) if n == count]
            yield row["name"], report["settings"]["shape"], row["options"]["placement"], of_count, count


def main() -> None:
    """Predict every row of a folder, and write what was said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    fitted = Machine.read("h100-server")
    probed = Machine.read(folder / "machine-corrected.json")
    figures = {name: figure for name, figure in probed.figures.items() if name != "update_adamw"}
    machine = replace(probed, figures=figures | {name: fitted.figures[name] for name in FITTED})
    programs: dict[tuple[str, str, str], Program] = {}

    def known(shape: str, placement: Mapping[str, str], rings: str) -> Program:
        key = shape, json.dumps(placement), rings
        if key not in programs:
            if rings == "of then":
                with rings_of_tiles():
                    programs[key] = program(shape, placement, machine)
            else:
                programs[key] = program(shape, placement, machine)
        return programs[key]

    rows = []
    for name, shape, placement, seconds, steps in measured_rows(folder):
        row: dict[str, Any] = {"name": name, "shape": shape, "placement": placement, "steps_of_a_round": steps}
        row |= {"measured_s": mean(seconds), "rounds_s": seconds}
        for rings in ("of then", "of now"):
            row[f"said_s, rings {rings}"] = round_seconds(known(shape, placement, rings), MachineCosts(machine), steps)
        row["ratio"] = row["said_s, rings of then"] / row["measured_s"]
        rows.append(row)
        then, now = (row[f"said_s, rings {rings}"] for rings in ("of then", "of now"))
        print(
            f"{name:24} {shape:11} rounds of {steps}: measured {row['measured_s']:.3f} s, said {then:.3f} "
            f"({row['ratio']:.2f}); with stretches {now:.3f}",
            flush=True,
        )
    eight = {"params": "device", "grads": "device", "optimizer": "cpu"}
    updates = []
    for rings in ("of then", "of now"):
        for wake in WAKES:
            stated = {"wake_seconds": wake, "update": 131e9} | LINK
            costs = MachineCosts(
                replace(machine, figures=machine.figures | {n: Rate.stated(v) for n, v in stated.items()})
            )
            took, traffic = update_seconds(known("llama-3-8b", eight, rings), costs)
            updates.append({"rings": rings, "wake_s": wake, "update_s": took, "traffic_s": traffic})
            print(
                f"update of 8B, rings {rings}, {wake * 1e6:3.0f} us: {took:.3f} s, traffic {traffic:.3f} "
                f"({took / traffic:.3f})",
                flush=True,
            )
    found = {
        "machine": {name: machine.figures[name].value for name in sorted(machine.figures)},
        "median_ratio": median(row["ratio"] for row in rows),
        "rows": rows,
        "update_of_8B": updates,
    }
    (folder / "rings.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
