"""One contender in a process of its own: `measure.py SETTINGS OUT` reads settings as JSON and writes rows as JSON.

`run.py` starts it. There is a row for each batch size. They are written after each round of steps, so that one that is
ended later keeps what was measured. Every figure is null in the row of a contender that failed.
"""

import gzip
import inspect
import json
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from rows import RATES
from torch import Tensor

from penstock.errors import MemoryBudgetError
from penstock.integrations.chunked import chunk_loss

PHASES = ("forward", "backward", "step")
TRACED_STEPS = 2
WAITS_KEPT = 10
COPIED_BYTES, COPIES = 256 << 20, 4
#: Categories of the profiler's events that a stored trace keeps.
KEPT_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime")


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


@dataclass
class Round:
    """Some steps, one after the other, until all is done.

    Attributes:
        marks: of each step, on the device's stream: its begin, and the end of each phase.
        moments: the same by the host's clock, in seconds.
        losses: of each step, on the device.
    """

    seconds: float = 0.0
    marks: list[list[Any]] = field(default_factory=list)
    moments: list[list[float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def take_steps(training: Training, batches: Sequence[Tensor], clock: Clock) -> Round:
    """Take a step for each batch."""
    found = Round()
    clock.wait()
    started = time.perf_counter()
    for tokens in batches:
        marks, moments = [clock.mark()], [time.perf_counter()]
        with training.autocast():
            loss = training.model(input_ids=tokens, labels=tokens).loss
        marks.append(clock.mark())
        moments.append(time.perf_counter())
        training.backward(loss)
        marks.append(clock.mark())
        moments.append(time.perf_counter())
        training.step()
        marks.append(clock.mark())
        moments.append(time.perf_counter())
        found.marks.append(marks)
        found.moments.append(moments)
        found.losses.append(loss.detach())
        del loss
    training.finish()
    clock.wait()
    found.seconds = time.perf_counter() - started
    return found


def measure(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Prepare the contender, and give its figures for each batch size: as it begins, after each round, with traces."""
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
    common = {"arithmetic": arithmetic(settings), "flops_per_token": flops, "sequence": settings["sequence"]}
    rows = {}
    for batch in settings["batches"]:
        yield {"batch": batch}
        batches = data.batches(
            settings["data"],
            vocabulary=model.config.vocab_size,
            batch=batch,
            sequence=settings["sequence"],
            count=settings["warmup"] + settings["rounds"] * settings["steps"],
            device=device,
        )
        for found in measure_batch(training, batches, settings, device):
            rate = batch * settings["sequence"] / found["steady_step_ms"] * 1e3
            found |= common | {"batch": batch, "tokens_per_second": rate, "mfu": mfu(rate * flops, settings, device)}
            rows[batch] = found | {"setup_seconds": found["setup_seconds"] - started}
            yield rows[batch]
        started = time.perf_counter()
    yield from traces(training, rows[settings["batches"][0]], batches, settings, device)


def traces(
    training: Training, row: dict[str, Any], batches: Sequence[Tensor], settings: dict[str, Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Add penstock's trace and the profiler's to a row: last, since nothing else needs them."""
    again = [tokens[: row["batch"]] for tokens in (list(batches) * TRACED_STEPS)[:TRACED_STEPS]]
    clock = Clock(device)
    row |= {"trace": traced(training, again, clock)}
    yield row
    if device.type == "cuda":
        yield row | profiled(lambda: take_steps(training, again, clock), settings["trace_out"])


def measure_batch(
    training: Training, batches: Sequence[Tensor], settings: dict[str, Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Take the rounds of one batch size; `setup_seconds` is the moment when warm-up was over."""
    warmup, steps = settings["warmup"], settings["steps"]
    clock = Clock(device)
    take_steps(training, batches[:warmup], clock)
    warm = time.perf_counter()
    memory = None if device.type == "cpu" else torch.get_device_module(device)
    if memory:
        memory.reset_peak_memory_stats()
    taken: list[Round] = []
    found: dict[str, Any] = {}
    with Resident() as resident:
        for start in range(warmup, len(batches), steps):
            taken.append(take_steps(training, batches[start : start + steps], clock))
            found = timings(taken, clock) | {
                "device_peak_bytes": memory.max_memory_allocated() if memory else 0,
                "device_reserved_bytes": memory.max_memory_reserved() if memory else 0,
                "pinned_bytes": pinned_bytes() + training.pinned_bytes(),
                "resident_bytes": resident.peak_bytes,
                "setup_seconds": warm,
            }
            yield found


def arithmetic(settings: dict[str, Any]) -> dict[str, Any]:
    """What the contender computes in."""
    return {
        "weights": "bfloat16",
        "masters": "fp32",
        "states": settings["states"],
        "max_grad_norm": settings["options"].get("max_grad_norm"),
        "recompute": settings["recompute"],
        "chunked_loss": settings["chunked_loss"],
        "attention": shapes.ATTENTION,
        "flops": shapes.FLOPS_FORMULA,
    }


def mfu(flops_per_second: float, settings: dict[str, Any], device: torch.device) -> float | None:
    """The share of the device's peak; `None` where that is not known."""
    name = None if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    peak = settings["peak_flops"] or shapes.peak_flops(name)
    return flops_per_second / peak if peak else None


def timings(taken: Sequence[Round], clock: Clock) -> dict[str, Any]:
    """What the rounds so far say of a step, and the losses of all of them."""
    on_device = [[clock.milliseconds(*pair) for pair in pairwise(marks)] for each in taken for marks in each.marks]
    on_host = [[(b - a) * 1e3 for a, b in pairwise(moments)] for each in taken for moments in each.moments]
    # From a step's beginning to that of the next, but of the first step of a round, which no update is behind.
    begins = [[marks[0] for marks in each.marks] for each in taken]
    steady = [clock.milliseconds(*pair) for times in begins for pair in list(pairwise(times))[1:]]
    drained = [each.seconds / len(each.marks) * 1e3 for each in taken]
    return {
        "steady_step_ms": statistics.median(steady or drained),
        "step_ms": statistics.median(drained),
        "round_step_ms": drained,
        "phases_ms": medians(on_device),
        "host_ms": medians(on_host),
        "losses": [float(loss) for each in taken for loss in each.losses],
    }


def medians(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of each phase, over the steps."""
    return dict(zip(PHASES, map(statistics.median, zip(*steps, strict=True)), strict=True))


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


def profiled(take: Callable[[], object], out: str | None) -> dict[str, Any]:
    """Kernels and copies of a step, of the traced ones; their trace is written to `out`, compressed."""
    copies = pinned_copies()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        take()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    if out is not None:
        kept = [event for event in events if event.get("cat") in KEPT_EVENTS or event.get("ph") == "M"]
        with gzip.open(out, "wt") as file:
            json.dump({"traceEvents": kept}, file)
    profile = summary(events, TRACED_STEPS)
    link = {}
    for way, bytes_per_second in copies.items():
        seconds = profile[way]["ms"] / 1e3
        found = profile[way]["bytes"] / seconds if seconds else None
        link[way] = {"bytes_per_second": found, "of_pinned_copies": found and found / bytes_per_second}
    return {"profile": profile, "pinned_copies": copies, "link": link}


def summary(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """What the profiler's events add up to, a step."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    ways = {"up": [c for c in copies if "HtoD" in c["name"]], "down": [c for c in copies if "DtoH" in c["name"]]}
    found: dict[str, Any] = {
        "kernel_ms": busy_ms(kernels) / steps,
        "launches": len(kernels) / steps,
        "busy_ms": busy_ms([*kernels, *copies]) / steps,
    }
    for way, moved in ways.items():
        nbytes = sum(copy.get("args", {}).get("bytes", 0) for copy in moved)
        found[way] = {"ms": busy_ms(moved) / steps, "bytes": nbytes / steps}
    return found


def busy_ms(events: Sequence[dict[str, Any]]) -> float:
    """Milliseconds in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def pinned_copies() -> dict[str, float]:
    """Bytes/s of the fastest copy of pinned memory, up and down."""
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    found = {}
    for way, target, source in (("up", device, host), ("down", host, device)):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 1)]
        marks[0].record()
        for mark in marks[1:]:
            target.copy_(source, non_blocking=True)
            mark.record()
        torch.cuda.synchronize()
        fastest_ms = min(start.elapsed_time(stop) for start, stop in pairwise(marks))
        found[way] = COPIED_BYTES / max(fastest_ms, 1e-6) * 1e3
    return found


def main() -> None:
    """Measure, and write what came of it: the rows, the batch size under way, and what went wrong."""
    settings, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    rows: dict[int, dict[str, Any]] = {}
    report: dict[str, Any] = {"under_way": settings["batches"][0], "status": "", "reason": "", "rows": []}
    try:
        for found in measure(settings):
            report["under_way"] = found["batch"]
            if len(found) > 1:
                rows[found["batch"]] = dict.fromkeys(RATES) | found
            report["rows"] = list(rows.values())
            parts.write_report(out, report)
        report["under_way"] = None
    except Exception as error:
        traceback.print_exc()
        memory_ran_out = isinstance(error, MemoryError | MemoryBudgetError | torch.OutOfMemoryError)
        report["status"] = "out of memory" if memory_ran_out else "failed"
        report["reason"] = f"{type(error).__name__}: {inspect.cleandoc(str(error))[:400]}"
    parts.write_report(out, report)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
