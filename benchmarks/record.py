"""What a record costs a step: steps with and without one, in turns, in one process.

    python benchmarks/record.py [--units 48] [--rounds 12] [--json FILE]

Prints ratios of rounds, with over without, of the median step: of its seconds, and of the processor's time of this
process, which says more where others use the machine; each with quartiles. And the seconds that the line of a step
takes by itself. The steps that a record traces are left out: they are two of a run.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.ext.observe.record import Record

WARM = 4  # steps of a round that are not counted: the trace is among them


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--units", type=int, default=48)
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=24)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(given.width, given.width) for _ in range(given.units)))
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, overlap="forward")
    batch = torch.randn(64, given.width)

    def steps(recorder: Record | None) -> tuple[float, float]:
        taken, worked = [], []
        for _ in range(given.steps + WARM):
            begun, began_working = time.perf_counter(), time.process_time()
            loss = model(batch).float().square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.log(loss=loss.detach(), tokens=64)
            taken.append(time.perf_counter() - begun)
            worked.append(time.process_time() - began_working)
        return statistics.median(taken[WARM:]), statistics.median(worked[WARM:])

    lines: list[float] = []
    line = Record._line

    def timed(self: Record, *rest: object) -> dict[str, object]:
        begun = time.perf_counter()
        found = line(self, *rest)  # type: ignore[arg-type]
        lines.append(time.perf_counter() - begun)
        return found

    ratios, plain = [], []
    steps(None)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            pair = {}
            for recorded in (False, True) if number % 2 else (True, False):
                if recorded:
                    Record._line = timed  # type: ignore[method-assign]
                    with optimizer.record(folder) as recorder:
                        pair[recorded] = steps(recorder)
                    Record._line = line  # type: ignore[method-assign]
                else:
                    pair[recorded] = steps(None)
            ratios.append([with_it / without for with_it, without in zip(pair[True], pair[False], strict=True)])
            plain.append(pair[False][0])
    optimizer.close()
    of_seconds, of_work = (statistics.quantiles(column, n=4) for column in zip(*ratios, strict=True))
    found = {
        "units": given.units,
        "step_seconds": statistics.median(plain),
        "ratio_of_seconds": of_seconds,
        "ratio_of_processor_time": of_work,
        "line_seconds": statistics.median(lines),
        "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__},
    }
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
