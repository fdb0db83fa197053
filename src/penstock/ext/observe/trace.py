"""The first output of the observer: a trace of a block, as a file for a viewer and a report."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from typing import IO, Any

from penstock.engine.engine import Engine, bytes_by_tier
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.ext.observe.observer import observe
from penstock.ext.observe.timeline import Recording, TraceSummary, TraceTimeline, to_chrome
from penstock.files import open_own

RANK = "{rank}"
STEP = "step"


class TraceReport:
    """Result of a trace. Print it for a table.

    Attributes:
        summary: the analysis of the trace; `None` until the block has ended.
    """

    def __init__(self) -> None:
        self.summary: TraceSummary | None = None

    def __str__(self) -> str:
        return "The trace is not over yet." if self.summary is None else str(self.summary)


@contextmanager
def take_trace(path: str | PathLike[str], engine: Engine) -> Iterator[TraceReport]:
    """Take a trace of a `with` block, as `penstock.Optimizer.trace` says. Collective."""
    streams, rank = engine.context.streams, engine.context.ranks.rank
    name = os.fspath(path)
    with ExitStack() as opened:
        file: IO[str] | None = None
        failure: PenstockError | None = None
        if streams.observer is not None and streams.observer.is_traced:
            failure = EngineError("trace() was called inside another trace. Leave that block first.")
        elif rank == 0 or RANK in name:
            try:
                file = opened.enter_context(open_own(name.replace(RANK, str(rank)), "w", encoding="utf-8"))
            except OSError as error:
                failure = _refused(name, error)
        # First: if this rank raised alone, the others would go on into collectives without it.
        engine.context.ranks.control_group.agree(failure)
        # Work under way was submitted without notes: a wait for it inside the block could not be labelled.
        engine.access.finish()
        report = TraceReport()
        observer = observe(streams)
        observer.begin_trace(sizes=partial(bytes_by_tier, engine))
        ended = False
        try:
            yield report
            ended = True
        finally:
            timeline = TraceTimeline(observer.end_trace(wait=ended))  # after a failure some work may never be done
            report.summary = timeline.summary()
            if file is not None:
                try:
                    file.writelines(to_chrome(timeline, rank, _marks(timeline.recording, rank)))
                    file.flush()
                except OSError as error:
                    raise _refused(name, error) from error


def _marks(recording: Recording, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the events beside the rows: an instant where each step returned, and a counter for each tier.

    A counter has a value where its bytes change, and at the end, up to which the last one holds.
    """

    def at(when: float) -> float:
        return (when - recording.start) * 1e6

    for number, when in enumerate(recording.steps, 1):
        yield {"ph": "i", "s": "p", "pid": rank, "tid": 0, "name": f"{STEP} {number}", "cat": STEP, "ts": at(when)}
    tiers = list(dict.fromkeys(tier for _, sizes in recording.sizes for tier in sizes))
    last: Mapping[str, int] = {}
    for when, sizes in (*recording.sizes, *((recording.stop, sizes) for _, sizes in recording.sizes[-1:])):
        for tier in tiers:
            if sizes.get(tier, 0) != last.get(tier) or when == recording.stop:
                value = {"bytes": sizes.get(tier, 0)}
                yield {"ph": "C", "pid": rank, "name": f"bytes on {tier}", "ts": at(when), "args": value}
        last = {tier: sizes.get(tier, 0) for tier in tiers}


def _refused(name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"The trace cannot be written to {name!r}: {error.strerror}. Give a file on a disk with space, in a folder "
        "that exists and that you can write."
    )
