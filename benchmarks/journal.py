"""What a check found so far, line by line in a file: whatever ends the process, the lines before that are there.

A line says that an item begins, or is its row. Who starts again over the same file goes on after the last item that
began: one that ended its process is not tried twice.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The environment variable that names the file.
JOURNAL = "PENSTOCK_JOURNAL"
#: The exit status of a process that gives up because the device does not work any more.
DEVICE_LOST = 70


def read(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from a place in the file, and the place after them."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        found = file.read()
    whole = found[: found.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


class Journal:
    """The file that `PENSTOCK_JOURNAL` names; without one, rows are printed.

    Attributes:
        begun: the items that began, here or in a process before.
    """

    def __init__(self) -> None:
        named = os.environ.get(JOURNAL)
        self._path = Path(named) if named else None
        lines = read(self._path)[0] if self._path else []
        self.begun = {line["begins"] for line in lines if "begins" in line}

    def begin(self, name: str) -> None:
        """An item begins."""
        self.begun.add(name)
        self._write({"begins": name})

    def end(self, name: str, status: str, seconds: float, reason: str = "", **figures: Any) -> None:
        """Its row."""
        row = {"name": name, "status": status, "seconds": round(seconds, 3), "reason": reason, **figures}
        self._write({"row": row})

    def take(self, name: str, item: Callable[[], dict[str, Any]]) -> None:
        """Run an item that did not begin yet; an error is a row too.

        Arguments:
            name: of the row.
            item: returns its figures, among them "wrong": what is not as it should be, if anything.
        """
        if name in self.begun:
            return
        self.begin(name)
        started = time.perf_counter()
        try:
            figures = item()
        except Exception as error:
            self.end(name, "failed", time.perf_counter() - started, f"{type(error).__name__}: {error}"[:2000])
            give_up_without_device()
        else:
            wrong = figures.pop("wrong", "")
            self.end(name, "failed" if wrong else "passed", time.perf_counter() - started, wrong, **figures)

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is None:
            print(json.dumps(line), flush=True)
            return
        with self._path.open("a") as file:  # one write: a line is there whole, or as a piece that nobody reads
            file.write(json.dumps(line) + "\n")


def give_up_without_device() -> None:
    """End the process where the device fails at everything: an error such as an illegal access stays for good."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    try:
        torch.ones(8, device=device).sum().item()
    except Exception:
        os._exit(DEVICE_LOST)
