"""The second output of the observer: a record of a run, in a folder.

It has a line for each step, the bytes of a warm step, and a trace of it.
"""

import numbers
import os
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor

from penstock.engine.engine import Engine, bytes_by_tier, locate
from penstock.engine.step.step import StepResult
from penstock.errors import ConfigError, EngineError, PenstockError, one_line
from penstock.ext.observe.observer import WaitSums, observe
from penstock.ext.observe.timeline import RESOURCES, TraceSummary
from penstock.ext.observe.trace import RANK, TraceReport, take_trace
from penstock.files import Lines, check_own, write_whole

METRICS_NAME = "metrics.jsonl"
TRACE_NAME = "trace.json"
PLAN_NAME = "plan.json"
#: Steps before the trace: in the first, units learn their order and buffers are made.
STEPS_BEFORE = 1
#: Steps of the trace. The first of them finds nothing under way that it could wait for; the last one is looked at.
STEPS_TRACED = 2

#: Lines of the newest steps, for means and medians.
LINES_KEPT = 1000

Number = float | Tensor


class Record(AbstractContextManager["Record"]):
    """Writes the steps of an optimizer to a folder, for `penstock report`. `Optimizer.record` makes one.

    Every rank has one; the first writes, and the others' methods do nothing. Used as a context, closed at its end.

    Attributes:
        closed: whether it has ended.
        folder: where its files are.
        steps: steps that were made, those before it included.

    Example:
        >>> with optimizer.record("runs/first") as recorder:  # doctest: +SKIP
        ...     for batch in loader:
        ...         loss = model(**batch).loss
        ...         optimizer.backward(loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         recorder.log(loss=loss, tokens=batch["input_ids"].numel())
    """

    def __init__(self, engine: Engine, folder: str | PathLike[str], begin: int) -> None:
        self.folder = Path(folder)
        self.steps = begin
        self._engine = weakref.ref(engine)  # a recorder keeps no model alive
        self._begin = begin
        self._lines: Lines | None = None
        self._late: list[tuple[int, str, Tensor]] = []
        self._trace: ExitStack | None = None
        self._trace_ends = 0
        self._is_traced = self._is_placed = False
        self._skipped_count = 0
        self._counted: dict[str, int] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=LINES_KEPT)
        self._taken = begin
        self._report: TraceReport | None = None
        self._summary: TraceSummary | None = None
        self._began = self._last = time.monotonic()
        self.closed = False

    @classmethod
    def open(cls, engine: Engine, folder: str | PathLike[str], begin: int, *, before: "Record | None") -> Self:
        """Check the request, and open the file on the first rank. Existing files do not change.

        Arguments:
            engine: the engine whose steps will be recorded.
            folder: the folder of the files.
            begin: the number of steps that were made before.
            before: the optimizer's last record.

        Raises:
            ConfigError: the file cannot be written, or an argument is not as `Optimizer.record` says.
            EngineError: nothing trains the model, or its steps are being recorded.
        """
        if before is not None and not before.closed:
            raise EngineError(f"record() was called while steps are recorded in {before.folder}. Close that one first.")
        if not engine.context.trains:
            raise EngineError("record() was called, and nothing trains this model: there are no steps to record.")
        if type(begin) is not int or begin < 0:
            raise ConfigError(f"record(begin={begin!r}): give the number of steps that were made before, such as 100.")
        if RANK in os.fspath(folder):
            raise ConfigError(f"record({os.fspath(folder)!r}): the first rank alone writes. Leave {RANK} out.")
        record = cls(engine, folder, begin)
        if engine.context.ranks.rank == 0:
            record._lines = Lines(record.folder / METRICS_NAME)
        return record

    def start(
        self, engine: Engine, given: torch.optim.Optimizer, plan: str | None, config: Mapping[str, Any] | None
    ) -> Self:
        """Write the first line, and begin to measure. Files of an earlier run are removed, unless this one goes on.

        Arguments:
            engine: the engine whose steps are recorded.
            given: the optimizer that `prepare` was given.
            plan: the file of the plan that placed it; `None` without one.
            config: settings of the run.
        """
        if self._lines is not None:
            self._lines.begin(goes_on=self._begin > 0)
            for name in () if self._begin else (TRACE_NAME, PLAN_NAME):
                with suppress(OSError):
                    check_own(self.folder / name).unlink(missing_ok=True)
            self._lines.write("start", {"begin": self._begin, **_about(engine, given), "config": config or {}})
            if plan is not None:
                with suppress(OSError):
                    write_whole(check_own(self.folder / PLAN_NAME), plan)
        observer = observe(engine.context.streams)
        observer.on_step = self.step_made
        if self._lines is not None:  # other ranks write no waits, and would keep each
            observer.waits = WaitSums(engine.context.streams)
        self._written(engine)  # what was written before is of no step
        self._began = self._last = time.monotonic()
        return self

    # Called by the user

    def log(self, *, step: int | None = None, **figures: Number) -> None:
        """Add figures of a step: `loss`, `tokens`, and any other that should have a curve.

        Tokens are those of the step, of the ranks that you count, and become tokens per second. A tensor is read after
        the next step, when the device has long computed it, so that the host does not wait for it.

        Arguments:
            step: the number of the step; `None` for the last one: call it after `optimizer.step()`.
            figures: numbers, or tensors of one element.

        Raises:
            ConfigError: a figure is neither.

        Example:
            >>> recorder.log(loss=loss, tokens=batch["input_ids"].numel())  # doctest: +SKIP
        """
        of_step = self.steps if step is None else step
        now: dict[str, float] = {}
        for name, value in figures.items():
            given: object = value
            if isinstance(given, Tensor) and given.numel() == 1:
                self._late.append((of_step, name, given.detach()))
            elif isinstance(given, numbers.Real) and name != "event":
                now[name] = float(given)
            else:
                raise ConfigError(f"log({name}={given!r:.80}): give a number, or a tensor of one element.")
        if self._recent and self._recent[-1]["step"] == of_step and "tokens" in now:
            self._recent[-1]["tokens"] = now["tokens"]
        if now:
            self._write("step", {"step": of_step, **now})

    def evaluation(self, loss: float, *, step: int | None = None) -> None:
        """Add the loss on held-out data, after the last step or another one."""
        self._write("eval", {"step": self.steps if step is None else step, "loss": float(loss)})

    def sample(self, prompt: str, text: str, *, step: int | None = None) -> None:
        """Add text that the model generates for a prompt, after the last step or another one."""
        of_step = self.steps if step is None else step
        self._write("sample", {"step": of_step, "prompt": str(prompt), "text": str(text)})

    def take(self) -> dict[str, Any]:
        """Return the means over the steps since the last call, or the newest of them, for logs of the loop's own.

        Returns:
            `step_seconds`, `waits` (the share of a step that compute stood still, by row) and their sum `waited`, and
            `tokens_per_second` if tokens were logged as numbers. Empty without steps, and on all ranks but the first.
        """
        lines = [line for line in self._recent if line["step"] > self._taken]
        seconds, self._taken = sum(line["step_seconds"] for line in lines), self.steps
        if not seconds:
            return {}
        means: dict[str, Any] = {"step_seconds": seconds / len(lines)}
        observed = [line for line in lines if "waits" in line]
        if span := sum(line["step_seconds"] for line in observed):
            waits: defaultdict[str, float] = defaultdict(float)
            for line in observed:
                for row, share in line["waits"].items():
                    waits[row] += share * line["step_seconds"] / span
            means |= {"waited": sum(waits.values()), "waits": dict(waits)}
        tokens = sum(line.get("tokens", 0.0) for line in lines)
        return means | ({"tokens_per_second": tokens / seconds} if tokens else {})

    def measured(self) -> dict[str, float]:
        """Return the seconds of a warm step (`step`, a median), and in it those of each resource that worked, by name.

        Empty on all ranks but the first, and before the trace is over. What `penstock.planner.block` takes.
        """
        warm = [line for line in self._recent if "waits" in line and line["step"] > self._begin + STEPS_BEFORE]
        if self._summary is None or not warm:
            return {}
        busy: defaultdict[str, float] = defaultdict(float)
        for row, use in self._summary.rows.items():
            busy[RESOURCES[row]] += use.busy_seconds / STEPS_TRACED
        return {"step": median(line["step_seconds"] for line in warm), **busy}

    # Called by the optimizer

    def step_made(self, engine: Engine, result: StepResult, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the line of a step. Collective if a trace begins.

        1. The line: it does not wait for the device.
        2. Once, when a step was warm: the location of every byte.
        3. The trace of a warm step, which waits for submitted work before and after it.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self.steps += 1
        self._skipped_count += result.skipped
        # 1.
        late, self._late = self._late, []
        if self._lines is not None:
            self._recent.append(self._line(engine, result, groups, seconds))
            self._write("step", self._recent[-1])
            self._write_late(late)
        # 2.
        if not self._is_placed and self.steps - self._begin >= STEPS_BEFORE + STEPS_TRACED:
            self._place(engine)
        # 3.
        begun = time.monotonic()
        self._follow_trace(engine)
        self._last += time.monotonic() - begun  # it waits, which no step does

    def _line(
        self, engine: Engine, result: StepResult, groups: Sequence[Mapping[str, Any]], seconds: float
    ) -> dict[str, Any]:
        """Return the figures of the last step."""
        rates = [_rate(group.get("lr")) for group in groups]
        clip = abs(engine.context.gradient_scale.clip) or 1.0  # the loop's own: the step has seen clipped gradients
        line: dict[str, Any] = {
            "step": self.steps,
            "seconds": round(self._last - self._began, 6),
            "step_seconds": round(seconds, 6),
            "grad_norm": result.grad_norm / clip,
            "lr": rates[0] if len(set(rates)) == 1 else rates,
            "loss_scale": result.loss_scale,
            "skipped_count": self._skipped_count,
            "bytes_by_tier": bytes_by_tier(engine),
            "written_bytes": self._written(engine),
        }
        meter = observe(engine.context.streams).waits
        waits = {} if meter is None else meter.take()
        if self._trace is not None:
            return line | {"traced": True}  # the trace has the waits
        shares = {row: round(waited / seconds, 6) for row, waited in waits.items() if waited and seconds}
        return line | {"waited": sum(shares.values()), "waits": shares}

    def _written(self, engine: Engine) -> dict[str, int]:
        """Return the bytes that this rank has written to files since the last call, by tier, and for checkpoints."""
        counted = {tier.value: memory.written_bytes for tier, memory in engine.context.store.tiers.items()}
        counted["checkpoints"] = engine.context.streams.saved_bytes
        before, self._counted = self._counted, counted
        return {name: more for name, nbytes in counted.items() if (more := nbytes - before.get(name, 0))}

    def _place(self, engine: Engine) -> None:
        """Write the location of every byte."""
        self._is_placed = True
        if self._lines is not None:
            self._write("placement", {"step": self.steps, "rows": placement_rows(locate(engine).to_dict()["rows"])})

    # The trace

    def _follow_trace(self, engine: Engine) -> None:
        """Begin or end the trace when it is due. Collective where it begins."""
        if self._trace is not None:
            if self.steps >= self._trace_ends:
                self.end_trace()
        elif (
            not self._is_traced
            and self.steps - self._begin >= STEPS_BEFORE
            and not observe(engine.context.streams).is_traced
        ):
            self._is_traced, self._trace_ends = True, self.steps + STEPS_TRACED
            trace = ExitStack()
            with suppress(PenstockError):  # the file cannot be opened, as all ranks have agreed
                self._report = trace.enter_context(take_trace(self.folder / TRACE_NAME, engine))
                self._trace = trace

    def end_trace(self) -> None:
        """End the trace of a step if one is being taken, such as for a trace that the user asks for."""
        trace, self._trace = self._trace, None
        if trace is not None:
            try:
                trace.close()
            except PenstockError as error:
                warnings.warn(one_line(error), stacklevel=2)
            assert self._report is not None
            summary, is_whole = self._report.summary, self.steps >= self._trace_ends
            self._summary = summary if is_whole and self._lines is not None else None

    # The end

    def close(self) -> None:
        """Write the figures that are left, and close the files. Calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        written: dict[str, int] = {}
        engine = self._engine()
        if engine is not None and not engine.closed:
            self.end_trace()
            if not self._is_placed:
                self._place(engine)
            written = self._written(engine)
            observer = observe(engine.context.streams)
            observer.on_step = observer.waits = None
            observer.leave()
        if self._lines is not None:
            self._write_late(self._late)
        self._late = []
        seconds = round(time.monotonic() - self._began, 6)
        self._write("end", {"steps": self.steps, "seconds": seconds, "written_bytes": written})
        if self._lines is not None:
            self._lines.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write_late(self, late: Sequence[tuple[int, str, Tensor]]) -> None:
        """Write the tensors that were logged, a line for each step."""
        of_steps: dict[int, dict[str, float]] = {}
        for step, name, value in late:
            of_steps.setdefault(step, {})[name] = value.item()
        for step, figures in of_steps.items():
            self._write("step", {"step": step, **figures})

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(event, values)


def placement_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up the rows of a `LocationReport` that differ only in their sizes."""
    keys = ("unit", "kind", "tier", "dtype", "pinned")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        name = tuple(row[key] for key in keys)
        added = found.setdefault(name, {**dict(zip(keys, name, strict=True)), "numel": 0, "nbytes": 0})
        added["numel"] += row["numel"]
        added["nbytes"] += row["nbytes"]
    return list(found.values())


def _rate(lr: Any) -> float | None:
    """Read a learning rate; `None` if it is on a device, as the host would have to wait for it."""
    if isinstance(lr, Tensor):
        return float(lr) if lr.device.type == "cpu" and lr.numel() == 1 else None
    return float(lr) if isinstance(lr, numbers.Real) else None


def _about(engine: Engine, given: torch.optim.Optimizer) -> dict[str, Any]:
    """Describe the model, the optimizer and the ranks."""
    parameters = [
        (p.tensor.numel(), unit.trained is not None) for unit in engine.context.units for p in unit.parameters
    ]
    ranks, streams = engine.context.ranks, engine.context.streams
    dtypes = dict.fromkeys(str(unit.spec.dtype).removeprefix("torch.") for unit in engine.context.units)
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "device": str(streams.device),
        "precision": ", ".join(dtypes),
        "optimizer": type(given).__name__,
        "parameter_count": sum(count for count, _ in parameters),
        "trained_count": sum(count for count, trains in parameters if trains),
        "versions": {"torch": torch.__version__},
    }
