"""Backward on a cpu: what it costs to bring gradients home, by whose threads, beside plain torch's backward.

    python benchmarks/deposits.py --rounds 40

One process, the same model twice, which takes turns: plain torch, which leaves each gradient where it is made, and
penstock with everything on the cpu tier, whose deposits are made in several ways:

    torch   by the threads that torch computes with, which are awake: as it is
    own     by threads of our own, which want the cores that torch's still spin on
    norm    measured and not copied: what would be left if products were multiplied into the home
    none    not at all: the hooks alone

Malloc is tuned, so that nobody pays page faults. Ratios are paired by round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import machine
import step
import torch
from torch import Tensor

import penstock
from penstock.engine.gradients import reduce
from penstock.rules import Pool
from penstock.rules.formats import squared_norm

Deposit = Callable[..., float | Tensor]


def ways(threads: int) -> dict[str, Deposit]:
    """What stands for the deposit of a gradient."""
    deposit, own = reduce.deposit_part, Pool(threads)
    return {
        "torch": deposit,
        "own": lambda dst, start, stop, src, *, add, pool: deposit(dst, start, stop, src, add=add, pool=own),
        "norm": lambda dst, start, stop, src, *, add, pool: squared_norm(src, pool=pool),
        "none": lambda dst, start, stop, src, *, add, pool: 0.0,
    }


def backward_ms(training: contenders.Training, tokens: Tensor) -> float:
    """Milliseconds of a backward."""
    loss = training.model(input_ids=tokens, labels=tokens).loss
    started = time.perf_counter()
    training.backward(loss)
    return (time.perf_counter() - started) * 1e3


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take turns; milliseconds by contender, and medians of their ratios to plain torch."""
    torch.set_num_threads(arguments.threads)
    step.MODELS["blocks"] = {**step.MODELS["355m"], "num_hidden_layers": arguments.blocks, "vocab_size": 4000}
    device = torch.device("cpu")
    plain_model, model = (step.build_model("blocks", torch.bfloat16) for _ in range(2))
    plain = contenders.plain(plain_model, device)
    given = torch.optim.AdamW(model.parameters(), **contenders.HYPER)
    everything = dict.fromkeys(("params", "grads", "optimizer"), "cpu")
    optimizer = penstock.prepare(model, given, placement=penstock.Placement(**everything))
    mine = contenders.Training(model, optimizer.backward, optimizer.zero_grad)
    tokens = torch.randint(0, 4000, (1, arguments.sequence))
    found: dict[str, list[float]] = {}
    made = ways(arguments.threads)
    for number in range(arguments.rounds + 2):
        times = {"plain": backward_ms(plain, tokens)}
        plain_model.zero_grad(set_to_none=True)
        for name, deposit in made.items():
            reduce.deposit_part = deposit  # type: ignore[assignment]
            times[name] = backward_ms(mine, tokens)
            optimizer.zero_grad()
        if number >= 2:
            for name, elapsed in times.items():
                found.setdefault(name, []).append(elapsed)
    reduce.deposit_part = made["torch"]  # type: ignore[assignment]
    optimizer.close(keep_params=False)
    ratios = {
        name: statistics.median(a / b for a, b in zip(of, found["plain"], strict=True)) for name, of in found.items()
    }
    return {"backward_ms": found, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    arguments = parser.parse_args()
    if not all(os.environ.get(name) == value for name, value in machine.TUNED_MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | machine.TUNED_MALLOC)  # read at the start
    load = os.getloadavg()[0]
    result = measure(arguments)
    for name, elapsed in result["backward_ms"].items():
        fastest, median = min(elapsed), statistics.median(elapsed)
        print(f"{name:<6} fastest {fastest:.1f} ms, median {median:.1f}, of plain {result['ratios'][name]:.3f}")
    if arguments.out:
        settings = {key: getattr(arguments, key) for key in ("rounds", "blocks", "sequence", "threads")}
        report = {"machine": machine.describe(), "load_before": load, "settings": settings} | result
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
