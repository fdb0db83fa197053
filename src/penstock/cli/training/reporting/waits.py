"""What the steps of a run wait for, by a trace of two of them from time to time.

A trace begins and ends with a wait for all that is under way: the first of its steps finds nothing under way that it
could wait for, and the wait at its end is none of a step's. So two steps are traced, and what is told is the second.
"""

import json
import time
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.reporting.spread import Spread
from penstock.errors import ConfigError
from penstock.ext.observe.timeline import RESOURCES, WAITING

TRACE_NAME = "trace.json"
#: Steps at the begin that are not traced: in the first ones, units learn their order and buffers are made.
FIRST_STEPS = 2
#: The share of a run's time that traces may take. A trace of a longer time is paid off before the next.
COST_SHARE = 0.01
#: What a span takes to note, at most (docs/trace.md).
_SPAN_SECONDS = 1e-5
_LEAST_SHOWN = 0.005
_STEPS = 2  # of a trace
#: The rows whose names do not say it.
_UNSAID = ("read", "fetch", "write", "update")


@dataclass(frozen=True)
class Waits:
    """What a step has waited for.

    Attributes:
        waited: the share of the step in which compute stood still for movement or updates, 0 to 1.
        rows: the same by the row of the trace that it stood still for; the longest first.
        bound_by: the resource with the most busy time.
        seconds: how long the step was.
        busy_seconds: how long each resource worked in it.
    """

    waited: float
    rows: dict[str, float]
    bound_by: str
    seconds: float = 0.0
    busy_seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [(row, share) for row, share in self.rows.items() if share >= _LEAST_SHOWN]
        causes = ", ".join(
            f"{row}: {RESOURCES[row]} {share:.0%}" if row in _UNSAID else f"{row} {share:.0%}" for row, share in shown
        )
        return f"{self.waited:.0%}{f' ({causes})' if causes else ''}, bound by {self.bound_by}"

    def to_dict(self) -> dict[str, Any]:
        """List what `metrics.jsonl` says of them."""
        return {"waited": self.waited, "waits": self.rows, "bound_by": self.bound_by}


class Watch(AbstractContextManager["Watch"]):
    """Traces two steps of a run now and then. Every rank has one; all calls are collective. A context around the steps.

    Arguments:
        optimizer: whose work is traced.
        path: the file of the newest trace, written by the first rank.
        ranks: the place of this process.
        begin: steps that were made before the first one here.
    """

    def __init__(self, optimizer: penstock.Optimizer, path: Path, ranks: Ranks, *, begin: int = 0) -> None:
        self._optimizer, self._path, self._ranks = optimizer, path, ranks
        self._first = begin + FIRST_STEPS + 1
        self._next_time = 0.0
        self._trace: ExitStack | None = None
        self._report: Any = None
        self._second = -1
        self._cost = self._began = self._second_began = 0.0
        self._is_broken = False
        self._spread: Spread | None = None

    def __exit__(self, *error: Any) -> None:
        if self._trace is not None:
            trace, self._trace = self._trace, None
            with suppress(ConfigError):  # of a disk that is full: what ends the run says more
                trace.__exit__(*error)

    def begin(self, step: int, *, is_candidate: bool) -> None:
        """Open a trace where one is due, before a step is made.

        Arguments:
            step: the step that is made next.
            is_candidate: whether the step after it ends with a report; the same on every rank.
        """
        if self._trace is not None and step == self._second:
            self._second_began = time.monotonic()
        elif self._trace is None and is_candidate and step >= self._first and self._is_due():
            self._open(step)

    def end(self, step: int) -> Waits | None:
        """Close the trace of which `step` was the second, and read it. Others than the first rank are told nothing."""
        if self._trace is None or step != self._second:
            return None
        trace, self._trace = self._trace, None
        ended = time.monotonic()
        try:
            trace.close()
        except ConfigError:  # of the first rank's disk: it is full, or gone
            self._is_broken = True
        waits = self._read(ended) if self._ranks.is_first and not self._is_broken else None
        summary = self._report.summary
        self._spread = self._compared(summary)
        spans = 0 if summary is None else sum(use.spans for use in summary.rows.values())
        now = time.monotonic()
        self._cost += now - ended + spans * _SPAN_SECONDS
        self._next_time = now + self._cost / COST_SHARE
        return waits

    def take_spread(self) -> Spread | None:
        """Take how evenly the ranks have worked in the last trace; `None` where there was none since."""
        spread, self._spread = self._spread, None
        return spread

    def _compared(self, summary: Any) -> Spread | None:
        """Put together what the steps of all ranks took; as often as there are traces, so it costs what they may."""
        if self._ranks.world_size == 1:
            return None
        own = 0.0
        if summary is not None:
            # Collectives include the time until the other ranks come: the one that comes last has least of it.
            use = summary.rows.get("collective")
            own = max(0.0, summary.seconds - (use.busy_seconds if use else 0.0)) / _STEPS
        seconds = torch.zeros(self._ranks.world_size, dtype=torch.float64)
        seconds[self._ranks.rank] = own
        return Spread(tuple(self._ranks.sum(seconds).tolist()), self._ranks.hosts)

    def _is_due(self) -> bool:
        """Ask the first rank whether the last trace is paid off: clocks differ, and a trace is taken by all or none."""
        due = torch.tensor(float(time.monotonic() >= self._next_time and not self._is_broken))
        return bool(self._ranks.from_first(due) > 0)

    def _open(self, step: int) -> None:
        began = time.monotonic()
        trace = ExitStack()
        try:
            self._report = trace.enter_context(self._optimizer.trace(self._path))
        except ConfigError:  # the file cannot be opened, as all ranks have agreed
            self._is_broken = True
            return
        self._trace, self._second = trace, step + 1
        # The trace's own clock begins at the end of what it waits for, a moment ago.
        self._began = self._second_began = time.monotonic()
        self._cost = self._began - began

    def _read(self, ended: float) -> Waits | None:
        """Read what the second step has waited for, which began at `self._second_began` and ended at `ended`."""
        summary = self._report.summary
        start, stop = (int((moment - self._began) * 1e6) for moment in (self._second_began, ended))  # microseconds
        if summary is None or not summary.complete or stop <= start:
            return None
        try:
            events = json.loads(self._path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError):
            return None
        rows: defaultdict[str, float] = defaultdict(float)
        busy: defaultdict[str, float] = defaultdict(float)
        for event in events:
            category = event.get("cat")
            if category != WAITING and category not in RESOURCES:
                continue
            within = max(0.0, min(event["ts"] + event["dur"], stop) - max(event["ts"], start))
            if category == WAITING:
                rows[event["name"].rpartition("(")[2].removesuffix(")")] += within
            else:
                busy[RESOURCES[category]] += within / 1e6
        shares = {row: waited / (stop - start) for row, waited in sorted(rows.items(), key=lambda item: -item[1])}
        return Waits(
            min(1.0, sum(shares.values(), 0.0)),
            {row: share for row, share in shares.items() if share},
            summary.bound_by,
            (stop - start) / 1e6,
            {name: seconds for name, seconds in busy.items() if seconds},
        )
