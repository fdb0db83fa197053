"""The peak of the resident set of some steps, beside what a plan says it is.

    python benchmarks/peak.py --folder /disk
    python benchmarks/peak.py --model 355m --tiers cpu nvme

A process for each row: it plans (on the machine as it is, which is probed once: a minute), trains a small model, so
that all libraries have taken what they keep, notes the resident set, and trains the model from a start on the
meta device. What was added at the peak is held against the plan's bytes of the host and of the device, which is a cpu.
With `mmap` the C library gives every block of a MiB back when it is freed; by default it keeps many of them.
"""

import argparse
import json
import multiprocessing as mp
import os
import tempfile
from pathlib import Path
from typing import Any

import machine
import step
import torch

MALLOCS: dict[str, dict[str, str]] = {"default": {}, "mmap": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}}
WARMUP, STEPS = 2, 6


def train(model: str, placement: Any) -> int:
    """Train for some steps; the peak of the resident set after the first ones, in bytes."""
    import penstock

    made = fake(model)
    given = torch.optim.AdamW(made.parameters())
    optimizer = penstock.prepare(made, given, placement=placement, max_grad_norm=1.0, weights="init")
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            machine.restart_peak()
        tokens = torch.randint(0, step.MODELS[model]["vocab_size"], (1, 128))
        loss = made(input_ids=tokens, labels=tokens).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    peak = machine.process_bytes("VmHWM")
    optimizer.close(keep_params=False)
    return peak


def fake(model: str) -> torch.nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return step.build_model(model, torch.bfloat16)


def row(pipe: Any, model: str, tier: str, folder: str, threads: int) -> None:
    """Plan and train, in a process of its own."""
    import penstock
    from penstock import planner

    torch.set_num_threads(threads)
    params, optimizer = step.TIERS[tier]
    placement = penstock.Placement(params=params, grads=params, optimizer=optimizer, nvme_path=folder)
    ids = torch.zeros(1, 128, dtype=torch.long)
    plan = planner.plan(
        lambda: step.build_model(model, torch.bfloat16),
        torch.optim.AdamW,
        lambda: {"input_ids": ids, "labels": ids},
        machine=planner.machine_for(None, [folder]),
        placement=placement,
        max_grad_norm=1.0,
    )
    train("tiny", placement)
    before = machine.process_bytes("VmRSS")
    taken = train(model, placement) - before
    planned = plan.peak_bytes["cpu"] + plan.peak_bytes["device"]
    pipe.send({"planned_bytes": planned, "resident_bytes": taken, "before_bytes": before, "ratio": taken / planned})


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every row, one after the other."""
    rows = []
    context = mp.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    for tier in arguments.tiers:
        for name, environment in MALLOCS.items():
            os.environ.update(environment)  # malloc reads it when the process starts
            mine, theirs = context.Pipe()
            given = (theirs, arguments.model, tier, arguments.folder, arguments.threads)
            process = context.Process(target=row, args=given, daemon=True)
            process.start()
            theirs.close()
            found = {"tier": tier, "malloc": name, **mine.recv()}
            process.join()
            for key in environment:
                del os.environ[key]
            print(
                f"{tier:<8}{name:<9}planned {found['planned_bytes'] / 2**20:7.0f} MiB, "
                f"resident {found['resident_bytes'] / 2**20:7.0f} MiB, {found['ratio']:.3f}",
                flush=True,
            )
            rows.append(found)
    settings = {"model": arguments.model, "threads": arguments.threads, "steps": STEPS}
    return {"machine": machine.describe(), "settings": settings, "rows": rows}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=step.MODELS, default="100m")
    parser.add_argument("--tiers", nargs="+", choices=step.TIERS, default=["cpu", "nvme", "files"])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
