"""Taking a trace: from the notes that streams let a recorder take to the file and the report."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TextIO

from penstock.errors import ConfigError, EngineError
from penstock.machine.collectives import Ranks
from penstock.machine.recorder import Recorder
from penstock.machine.streams import Streams
from penstock.trace import Summary, Timeline, to_chrome

RANK = "{rank}"


class TraceReport:
    """What a trace found, once its block has ended. Print it for a table.

    Attributes:
        summary: `None` until then.
    """

    def __init__(self) -> None:
        self.summary: Summary | None = None

    def __str__(self) -> str:
        return "The trace is not over yet." if self.summary is None else str(self.summary)


@contextmanager
def take_trace(path: str | PathLike[str], streams: Streams, ranks: Ranks) -> Iterator[TraceReport]:
    """See `penstock.Optimizer.trace`."""
    if streams.recorder is not None:
        raise EngineError("trace() was called inside another trace. Leave that block first.")
    file: TextIO | None = None
    failure: ConfigError | None = None
    if ranks.rank == 0 or RANK in os.fspath(path):
        try:
            file = open(os.fspath(path).replace(RANK, str(ranks.rank)), "w", encoding="utf-8")  # noqa: SIM115 - below
        except OSError as error:
            failure = _refused(path, error)
    ranks.check_failures(failure, streams.device)  # the other ranks would go on alone
    report = TraceReport()
    recorder = streams.recorder = Recorder(streams)
    ended = False
    try:
        yield report
        ended = True
    finally:
        try:
            recording = recorder.finish(wait=ended)  # of what failed, some work may never be done
        finally:
            streams.recorder = None
        timeline = Timeline(recording)
        report.summary = timeline.summary()
        if file is not None:
            try:
                with file:
                    file.write(json.dumps(to_chrome(timeline, ranks.rank)))
            except OSError as error:
                raise _refused(path, error) from error


def _refused(path: str | PathLike[str], error: OSError) -> ConfigError:
    return ConfigError(
        f"The trace cannot be written to {os.fspath(path)!r}: {error.strerror}. Give a file on a disk with space, in a "
        "folder that exists and that you can write."
    )
