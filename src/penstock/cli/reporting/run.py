"""What a folder says of a run: lines, a plan and a trace. All of it may be anybody's."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.cli.reporting.timeline import Timeline, read_timeline
from penstock.errors import ConfigError

METRICS_NAME = "metrics.jsonl"
PLAN_NAME = "plan.json"
_MOST_TEXT = 20_000
_MOST_NESTED = 8
#: Numbers of a step that are no curves of their own.
_NOT_DRAWN = ("step", "seconds", "slowest_rank", "skipped_count", "tokens", "step_seconds")


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
        evaluations: loss on held-out data, by step.
        samples: what the model has written.
        placement: where every byte was, a row for each kind of a unit on a tier.
        placement_step: after which step that was.
        end: its last line.
        plan: the file of the plan.
        timeline: one step of its trace.
        unread: lines that could not be read, a torn last one aside.
    """

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    bytes_by_tier: dict[int, dict[str, float]] = field(default_factory=dict)
    waits: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    placement: list[dict[str, Any]] = field(default_factory=list)
    placement_step: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    timeline: Timeline | None = None
    unread: int = 0

    @property
    def name(self) -> str:
        """What people call it: its folder."""
        return self.folder.resolve().name or str(self.folder)

    @cached_property
    def steps(self) -> list[int]:
        """The steps of which something is known, in order."""
        return sorted(self.figures)

    def column(self, name: str) -> list[float | None]:
        """List a figure over `steps`; `None` where it is not known."""
        return [self.figures[step].get(name) for step in self.steps]

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
        with (folder / METRICS_NAME).open("rb") as file:
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
            figures.setdefault("tokens_per_second", figures["tokens"] / figures["step_seconds"])
    run.plan = _plan(folder)
    run.timeline = read_timeline(folder)
    return run


def _objects(file: Any, run: Run) -> Iterator[dict[str, Any]]:
    """Read a file's lines. One without an end is being written, or was when its process ended: it is left out."""
    for line in file:
        if not line.endswith(b"\n"):
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
            for of_step in (run.figures, run.bytes_by_tier, run.waits, run.evaluations):
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
        run.figures.setdefault(step, {}).update(_numbers({**line, **more}))
        for name, table in (("bytes_by_tier", run.bytes_by_tier), ("waits", run.waits)):
            if isinstance(found := line.get(name), dict):
                table[step] = _numbers(found)
    elif event == "eval":
        if "loss" in (found := _numbers({"loss": line.get("loss")})):
            run.evaluations[step] = found["loss"]
    elif event == "sample":
        texts = (str(line.get(name, ""))[:_MOST_TEXT] for name in ("prompt", "text"))
        run.samples.append(Sample(step, *texts))
    elif event == "placement" and isinstance(rows := line.get("rows"), list):
        run.placement = [row for row in rows if isinstance(row, dict) and _numbers({"nbytes": row.get("nbytes")})]
        run.placement_step = step


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Leave those that are finite numbers."""
    return {
        str(name)[:100]: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


def _plan(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / PLAN_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def flattened(values: Mapping[str, Any], above: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """List settings as names and texts: names of nested ones joined by dots."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < _MOST_NESTED:
            yield from flattened(value, f"{above}{name}.", depth + 1)
        elif isinstance(value, list):
            yield f"{above}{name}", ", ".join(map(str, value))[:_MOST_TEXT]
        elif value not in (None, {}):
            yield f"{above}{name}", str(value)[:_MOST_TEXT]
