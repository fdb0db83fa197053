"""What a folder says of a run: lines, a plan and a trace. All of it may be anybody's."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.cli.reporting.timeline import TRACE_NAME, Timeline, read_timeline
from penstock.errors import ConfigError, shown
from penstock.files import open_regular, parse_object, read_bytes

T = TypeVar("T")

METRICS_NAME = "metrics.jsonl"
PLAN_NAME = "plan.json"
TIERS = ("device", "cpu", "nvme")
_MOST_BYTES, _MOST_LINE_BYTES, _MOST_PLAN_BYTES = 1 << 30, 1 << 24, 1 << 22
_MOST_TEXT = 20_000
_MOST_ODD = 1000
#: Far beyond anything that is measured, and few enough digits that sums, quotients and axes of them are numbers.
MOST_NUMBER = 1e30
_MOST_NESTED = 8
#: Of all steps together, for a rate: a shorter time was not measured.
_LEAST_SECONDS = 1e-6
_OF_ROW = ("unit", "kind", "tier", "dtype")
#: Numbers of a step that are no curves of their own.
_NOT_DRAWN = ("step", "seconds", "slowest_rank", "skipped_count", "tokens", "step_seconds")


class Writes(NamedTuple):
    """Bytes that were written to files: in all, in a step on average, and in a day at that rate."""

    nbytes: float
    in_a_step: float
    in_a_day: float


@dataclass(frozen=True)
class Sample:
    """What a model has written after `step` steps."""

    step: int
    prompt: str
    text: str


@dataclass
class Run:
    """A run, as its folder has it.

    Attributes:
        folder: where it is.
        about: its first line: settings, sizes, versions.
        figures: numbers of each step, by step.
        bytes_by_tier: bytes on each tier, by step.
        waits: shares of a step in which compute waited, by row, by step.
        written: bytes that were written to files since the step before, by what they are for, by step.
        evaluations: loss on held-out data, by step.
        samples: what the model has written.
        placement: where every byte was, a row for each kind of a unit on a tier.
        placement_step: after which step that was.
        end: its last line.
        plan: the file of the plan.
        timeline: one step of its trace.
        unread: lines that could not be read, a torn last one aside.
        odd: what is left out because it cannot be drawn: figures and files, by name.
    """

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_by_tier: dict[int, dict[str, float]] = field(default_factory=dict)
    waits: dict[int, dict[str, float]] = field(default_factory=dict)
    written: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    placement: list[dict[str, Any]] = field(default_factory=list)
    placement_step: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    timeline: Timeline | None = None
    unread: int = 0
    odd: dict[str, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What people call it: its folder."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def world_size(self) -> int:
        """How many ranks there were; 1 where nothing says it."""
        found = self.about.get("world_size")
        return found if isinstance(found, int) and found <= MOST_NUMBER else 1

    def numbers(self, values: object, above: str = "") -> dict[str, float]:
        """Take the numbers of a mapping that can be drawn, and note the names of those that cannot."""
        found: dict[str, float] = {}
        if values is not None and not isinstance(values, dict):
            self.leave_out(above.rstrip("."))
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, int | float) and not isinstance(value, bool):
                if abs(value) <= MOST_NUMBER:  # which no NaN is
                    found[str(name)[:100]] = value
                else:
                    self.leave_out(f"{above}{name}")
        return found

    def leave_out(self, name: str) -> None:
        """Note what is left out."""
        if len(self.odd) < _MOST_ODD:
            self.odd[name[:100]] = None

    @cached_property
    def steps(self) -> list[int]:
        """The steps of which something is known, in order."""
        return sorted(self.figures)

    def column(self, name: str) -> list[float | None]:
        """List a figure over `steps`; `None` where it is not known."""
        return [self.figures[step].get(name) for step in self.steps]

    def writes(self) -> dict[str, Writes]:
        """Add up what was written to files in all steps and after the last one, by what it is for."""
        took = [figures["step_seconds"] for figures in self.figures.values() if "step_seconds" in figures]
        if sum(took) < _LEAST_SECONDS:
            return {}
        totals: defaultdict[str, float] = defaultdict(float)
        for written in (*self.written.values(), self.numbers(self.end.get("written_bytes"), "written_bytes.")):
            for name, nbytes in written.items():
                totals[name] += nbytes
        return {name: Writes(n, n / len(took), n / sum(took) * 86400) for name, n in totals.items()}

    def names(self) -> list[str]:
        """List the figures that have a curve."""
        found = dict.fromkeys(name for of_step in self.figures.values() for name in of_step)
        return [name for name in found if name not in _NOT_DRAWN]


def read_run(folder: Path) -> Run:
    """Read a folder that `penstock train` or `Optimizer.record` has written, while it is being written too.

    Raises:
        ConfigError: it is none.
    """
    run = Run(folder)
    try:
        with open_regular(folder / METRICS_NAME) as file:
            for line in _objects(file, run):
                _take(line, run)
    except OSError as error:
        raise ConfigError(
            f"{folder / METRICS_NAME}: {error.strerror}. Name the --out of a penstock train, or the folder of an "
            "optimizer.record."
        ) from error
    if not run.about and not run.figures:
        raise ConfigError(f"{folder / METRICS_NAME} has no line of a run. Name another folder.")
    for figures in run.figures.values():
        if figures.get("step_seconds") and "tokens" in figures:
            speed = {"tokens_per_second": figures["tokens"] / figures["step_seconds"]}
            figures.update(run.numbers(speed) | figures)
    run.plan = _read(run, PLAN_NAME, _read_plan)
    run.timeline = _read(run, TRACE_NAME, read_timeline)
    return run


def _objects(file: Any, run: Run) -> Iterator[dict[str, Any]]:
    """Read a file's lines. One without an end is being written, or was when its process ended: it is left out."""
    is_inside = False  # of a line that is longer than any of ours
    while file.tell() < _MOST_BYTES and (line := file.readline(_MOST_LINE_BYTES)):
        has_end = line.endswith(b"\n")
        if is_inside or len(line) == _MOST_LINE_BYTES:
            run.unread += has_end
            is_inside = not has_end
            continue
        if not has_end:
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield found
        elif line.strip():
            run.unread += 1


def _take(line: Mapping[str, Any], run: Run) -> None:
    """Take over what a line says. Of what is said twice of a step, the last counts."""
    event, step = line.get("event"), line.get("step")
    known = {name: value for name, value in line.items() if name != "event"}
    if event == "start":
        begin = line.get("begin", math.inf)
        if isinstance(begin, int):  # goes on from there: what came after it was made again
            for of_step in (run.figures, run.bytes_by_tier, run.waits, run.written, run.evaluations):
                for late in [each for each in of_step if each > begin]:
                    del of_step[late]
            run.samples = [sample for sample in run.samples if sample.step <= begin]
        run.about = known
    elif event == "end":
        run.end = known
    elif isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53:
        _take_step(event, step, known, run)


def _take_step(event: Any, step: int, line: Mapping[str, Any], run: Run) -> None:
    if event == "step":
        rates = line.get("lr")
        more = {f"lr {number}": rate for number, rate in enumerate(rates)} if isinstance(rates, list) else {}
        if more:
            more["lr"] = rates[0]  # type: ignore[index]
        run.figures.setdefault(step, {}).update(run.numbers({**line, **more}))
        tables = {"bytes_by_tier": run.bytes_by_tier, "waits": run.waits, "written_bytes": run.written}
        for name, table in tables.items():
            found = run.numbers(line.get(name), f"{name}.")
            if isinstance(line.get(name), dict):
                table[step] = found
    elif event == "eval":
        if "loss" in (found := run.numbers({"loss": line.get("loss")})):
            run.evaluations[step] = found["loss"]
    elif event == "sample":
        texts = (_text(line.get(name, "")) for name in ("prompt", "text"))
        run.samples.append(Sample(step, *texts))
    elif event == "placement" and isinstance(rows := line.get("rows"), list):
        of_rows = (row for row in rows if isinstance(row, dict))
        run.placement = [
            {**{key: _text(row.get(key, "")) for key in _OF_ROW}, "pinned": row.get("pinned"), **nbytes}
            for row in of_rows
            if (nbytes := run.numbers({"nbytes": row.get("nbytes")}, "placement."))
        ]
        run.placement_step = step


def _read(run: Run, name: str, read: Callable[[Path], T]) -> T | None:
    """Read a file beside the lines; one that is there and cannot be read is noted."""
    try:
        return read(run.folder / name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        run.leave_out(name)
        return None


def _read_plan(file: Path) -> dict[str, Any]:
    return parse_object(read_bytes(file, _MOST_PLAN_BYTES), is_strict=False)


def _text(value: object) -> str:
    """Write a value as text, of a length that a page can have."""
    try:
        return str(value)[:_MOST_TEXT]
    except (ValueError, RecursionError):  # a number of thousands of digits, or what is nested as deep
        return shown(value)


def flattened(values: Mapping[str, Any], above: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """List settings as names and texts: names of nested ones joined by dots."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < _MOST_NESTED:
            yield from flattened(value, f"{above}{name}.", depth + 1)
        elif isinstance(value, list):
            yield f"{above}{name}", _text(", ".join(map(_text, value)))
        elif value not in (None, {}):
            yield f"{above}{name}", _text(value)
