"""`metrics.jsonl`: what a run tells to programs, one JSON object a line."""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"


class Metrics(AbstractContextManager["Metrics"]):
    """The file of a run's events. Used as a context, closed at its end.

    Arguments:
        folder: where it is.
        goes_on: whether to add to what an earlier run has left; else that is replaced.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, *, goes_on: bool) -> None:
        self._file = (folder / METRICS_NAME).open("a" if goes_on else "w", encoding="utf-8")

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Write a line, at once, so that others can follow the run."""
        self._file.write(json.dumps(to_json({"event": event} | values), allow_nan=False) + "\n")
        self._file.flush()


def to_json(value: Any) -> Any:
    """Write a number that is not finite as null: JSON has no NaN or infinity."""
    if isinstance(value, dict):
        return {name: to_json(of_name) for name, of_name in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
