"""One contender in a process of its own: `measure.py SETTINGS OUT` reads settings as JSON and writes a row as JSON.

`run.py` starts it. The row is written after each round of steps, so that one that is ended later keeps what was
measured. Every figure is null in the row of a contender that failed.
"""

import inspect
import json
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import contenders
import data
import machine
import parts
import shapes
import step
import torch
from contenders import Training
from rows import FIGURES
from torch import Tensor

from penstock.errors import MemoryBudgetError
from penstock.integrations.chunked import chunk_loss

TRACED_STEPS = 2
WAITS_KEPT = 10


class Resident:
    """The largest resident set of this process inside a `with` block, looked at every 20 ms."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, machine.process_bytes("VmRSS"))
            if self._ended.wait(0.02):
                return

    def __enter__(self) -> "Resident":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


class Clock:
    """Moments of the device's stream, without waiting for it; of the host, where the device is a cpu."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the device has done everything."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def milliseconds(self, start: Any, stop: Any) -> float:
        """Between two marks that are past."""
        return (stop - start) * 1e3 if self._device.type == "cpu" else float(start.elapsed_time(stop))


def take_steps(
    training: Training, batches: Sequence[Tensor], clock: Clock
) -> tuple[float, list[list[Any]], list[Tensor]]:
    """A step for each batch: the seconds of all, a list of marks for each, and the losses, on the device."""
    marks, losses = [], []
    clock.wait()
    started = time.perf_counter()
    for tokens in batches:
        times = [clock.mark()]
        with training.autocast():
            loss = training.model(input_ids=tokens, labels=tokens).loss
        times.append(clock.mark())
        training.backward(loss)
        times.append(clock.mark())
        training.step()
        times.append(clock.mark())
        marks.append(times)
        losses.append(loss.detach())
        del loss
    training.finish()
    clock.wait()
    return time.perf_counter() - started, marks, losses


def measure(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Prepare the contender, take its steps, and give its figures: after each round, and with the trace."""
    started = time.perf_counter()
    device = step.device_of(settings)
    model = shapes.build(
        settings["shape"], sequence=settings["sequence"], recompute=settings["recompute"], device=device
    )
    if settings["chunked_loss"]:
        chunk_loss(model)
    flops = shapes.flops_per_token(model, settings["sequence"])
    cap_memory(device, settings["memory_gb"])
    training = getattr(contenders, settings["setup"])(model, device, **settings["options"])
    warmup, rounds, steps = settings["warmup"], settings["rounds"], settings["steps"]
    batches = data.batches(
        settings["data"],
        vocabulary=model.config.vocab_size,
        batch=settings["batch"],
        sequence=settings["sequence"],
        count=warmup + rounds * steps + TRACED_STEPS,
        device=device,
    )
    clock = Clock(device)
    take_steps(training, batches[:warmup], clock)
    setup_seconds = time.perf_counter() - started
    memory = None if device.type == "cpu" else torch.get_device_module(device)
    if memory:
        memory.reset_peak_memory_stats()
    tokens = settings["batch"] * settings["sequence"]
    peak = settings["peak_flops"] or shapes.peak_flops(memory and memory.get_device_name())
    taken: list[tuple[float, list[list[Any]], list[Tensor]]] = []
    found: dict[str, Any] = {}
    with Resident() as resident:
        for start in range(warmup, warmup + rounds * steps, steps):
            taken.append(take_steps(training, batches[start : start + steps], clock))
            found = timings(taken, steps, clock)
            rate = tokens / found["steady_step_ms"] * 1e3
            found |= {
                "tokens_per_second": rate,
                "mfu": rate * flops / peak if peak else None,
                "device_peak_bytes": memory.max_memory_allocated() if memory else 0,
                "device_reserved_bytes": memory.max_memory_reserved() if memory else 0,
                "pinned_bytes": pinned_bytes() + training.pinned_bytes(),
                "resident_bytes": resident.peak_bytes,
                "flops_per_token": flops,
                "setup_seconds": setup_seconds,
            }
            yield found
    yield found | {"trace": traced(training, batches[-TRACED_STEPS:], clock)}


def timings(taken: Sequence[tuple[float, list[list[Any]], list[Tensor]]], steps: int, clock: Clock) -> dict[str, Any]:
    """What the rounds so far say of a step, and the losses of all of them."""
    spans = [[clock.milliseconds(*pair) for pair in pairwise(times)] for _, marks, _ in taken for times in marks]
    phases = map(statistics.median, zip(*spans, strict=True))
    # From a step's beginning to that of the next, but of the first step of a round, which no update is behind.
    begins = [[times[0] for times in marks] for _, marks, _ in taken]
    steady = [clock.milliseconds(*pair) for times in begins for pair in list(pairwise(times))[1:]]
    drained_ms = statistics.median(seconds for seconds, _, _ in taken) / steps * 1e3
    return {
        "steady_step_ms": statistics.median(steady) if steady else drained_ms,
        "step_ms": drained_ms,
        "round_step_ms": [seconds / steps * 1e3 for seconds, _, _ in taken],
        "phases_ms": dict(zip(("forward", "backward", "step"), phases, strict=True)),
        "losses": [float(loss) for _, _, losses in taken for loss in losses],
    }


def cap_memory(device: torch.device, memory_gb: float | None) -> None:
    """Let torch take so many GB (1e9 bytes) of the device, as if it had no more."""
    if device.type != "cpu" and memory_gb is not None:
        memory = torch.get_device_module(device)
        memory.empty_cache()
        total = memory.get_device_properties(device).total_memory
        memory.set_per_process_memory_fraction(min(1.0, memory_gb * 1e9 / total))


def pinned_bytes() -> int:
    """Page-locked by torch's allocator, with what it rounds up and keeps."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def traced(training: Training, batches: Sequence[Tensor], clock: Clock) -> dict[str, Any] | None:
    """What a step waits for, from penstock's trace; `None` for others."""
    if training.trace is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        with training.trace(Path(folder, "trace.json")) as report:
            take_steps(training, batches, clock)
        found: dict[str, Any] = report.summary.to_dict()
    return found | {"exposed_waits": dict(list(found["exposed_waits"].items())[:WAITS_KEPT])}


def main() -> None:
    """Measure, and write what came of it."""
    settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    outcome: dict[str, Any] = dict.fromkeys(FIGURES)
    try:
        for found in measure(settings):
            outcome |= {"status": "measured", "reason": ""} | found
            parts.write_report(out, outcome)
    except Exception as error:
        traceback.print_exc()
        memory_ran_out = isinstance(error, MemoryError | MemoryBudgetError | torch.OutOfMemoryError)
        reason = f"{type(error).__name__}: {inspect.cleandoc(str(error))[:400]}"
        if outcome["losses"]:  # some rounds were measured
            reason = f"figures of {len(outcome['round_step_ms'])} rounds; then {reason}"
        else:
            outcome["status"] = "out of memory" if memory_ran_out else "failed"
        parts.write_report(out, outcome | {"reason": reason})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
