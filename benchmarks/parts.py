"""A long check in parts: each in processes of its own, within a budget, and a report that is whole at every moment.

A part is a command that keeps a journal (`journal.py`). It is watched: what it found is in the report at once; an item
that hangs, or ends its process, is a row that says so, and the command is started again for the items after it. A part
that is over its budget is ended with every process that it started, and the next one begins.
"""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import journal

POLL_SECONDS = 0.1
LOG_CHARACTERS = 3000
LEAST_SECONDS = 2.0  # with less left, nothing is started
_PR_SET_PDEATHSIG = 1


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Replace a report: at any moment the file is the one from before or this one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")
    os.replace(beside, path)


def _finite(value: Any) -> Any:
    """The same with null for numbers that are not finite: JSON has none of those."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def source() -> str:
    """Hash of the sources of this checkout, `src` and `csrc`: reports with the same one measured the same code."""
    root = Path(__file__).resolve().parents[1]
    return hash_of(root, [*root.glob("src/**/*.py"), *root.glob("csrc/*")])


def hash_of(root: Path, files: Iterable[Path]) -> str:
    """Hash of files by their names below `root` and their contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Part:
    """One part of a check.

    Attributes:
        tells: what a reader learns of it.
        share: of the whole budget. What a part leaves goes to those after it.
        ok: exit statuses of a command that came to its end.
        folder: where it runs.
    """

    name: str
    tells: str
    command: Sequence[str]
    share: float
    ok: tuple[int, ...] = (0,)
    folder: Path | None = None


@dataclass
class Entry:
    """A part as the report has it.

    Attributes:
        under_way: the item that began and has no row yet: where a check was cut off.
    """

    name: str
    tells: str
    status: str = "waiting"
    reason: str = ""
    under_way: str = ""
    budget_seconds: float = 0.0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.under_way = ""
        self.counts[row["status"]] = self.counts.get(row["status"], 0) + 1


class Watched:
    """A part under way.

    Arguments:
        item_seconds: without a word for so long, the item is taken for one that hangs.
        changed: called when the entry has changed.
    """

    def __init__(
        self, part: Part, entry: Entry, item_seconds: float, environment: Mapping[str, str], changed: Callable[[], None]
    ) -> None:
        self._part, self._entry = part, entry
        self._item_seconds = item_seconds
        self._environment = environment
        self._changed = changed
        self._place = 0
        self._said = 0.0

    def run(self, seconds: float) -> None:
        """Run the part within so many seconds. Afterwards its status says how it ended."""
        entry, started = self._entry, time.monotonic()
        entry.status, entry.budget_seconds = "running", round(seconds, 1)
        self._changed()
        with tempfile.TemporaryDirectory() as scratch:
            while entry.status == "running":
                log = Path(scratch, "log")
                self._once(Path(scratch, "journal"), log, started + seconds)
        entry.seconds = round(time.monotonic() - started, 1)
        self._changed()

    def _once(self, lines: Path, log: Path, ends: float) -> None:
        """One process, until it is over; the status stays "running" where another one is to go on."""
        entry, before = self._entry, self._place
        environment = {**self._environment, journal.JOURNAL: str(lines)}
        with ended_with_us(list(self._part.command), log, environment, self._part.folder) as process:
            self._said = time.monotonic()
            wrong = self._watch(process, lines, ends)
        self._read(lines)
        last_words = _tail(log)
        code = process.returncode
        if wrong == "budget":
            entry.status, entry.reason = "over its budget", f"ended after {entry.budget_seconds:g} s"
            self._end_item("over its budget", last_words)
        elif wrong == "" and code in self._part.ok:
            entry.status = "done"
        else:
            how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            if not entry.under_way and self._place == before:  # the next one would get no further
                entry.status, entry.reason = "failed", f"{wrong or how}: {last_words}"
            elif code != journal.DEVICE_LOST:
                self._end_item("hung" if wrong else "crashed", f"{wrong or how}\n{last_words}")
        self._changed()

    def _watch(self, process: "subprocess.Popen[bytes]", lines: Path, ends: float) -> str:
        """Follow a process; why it has to be ended, or nothing where it ended by itself."""
        while process.poll() is None:
            self._read(lines)
            now = time.monotonic()
            if now > ends:
                return "budget"
            if now - self._said > self._item_seconds:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    process.send_signal(signal.SIGABRT)  # Python prints where each thread is
                    process.wait(1.0)
                return f"nothing came for {self._item_seconds:g} s"
            time.sleep(POLL_SECONDS)
        return ""

    def _read(self, lines: Path) -> None:
        found, self._place = journal.read(lines, self._place)
        for line in found:
            self._said = time.monotonic()
            if "begins" in line:
                self._entry.under_way = line["begins"]
            else:
                self._entry.add(line["row"])
        if found:
            self._changed()

    def _end_item(self, status: str, reason: str) -> None:
        name = self._entry.under_way
        if name:
            seconds = round(time.monotonic() - self._said, 1)
            self._entry.add({"name": name, "status": status, "seconds": seconds, "reason": reason})


def run_parts(
    parts: Sequence[Part],
    *,
    seconds: float,
    item_seconds: float,
    environment: Mapping[str, str],
    changed: Callable[[list[Entry]], None],
) -> list[Entry]:
    """Run all parts, one after the other, within so many seconds; `changed` is called with every row."""
    ends = time.monotonic() + seconds
    entries = [Entry(part.name, part.tells) for part in parts]
    for number, (part, entry) in enumerate(zip(parts, entries, strict=True)):
        left = ends - time.monotonic()
        own = left * part.share / sum(other.share for other in parts[number:])
        if own < LEAST_SECONDS:
            entry.status, entry.reason = "skipped", "no time was left"
            changed(entries)
            continue
        Watched(part, entry, item_seconds, environment, lambda: changed(entries)).run(own)
    return entries


@contextlib.contextmanager
def ended_with_us(
    command: list[str], log: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a group of its own; at the end of the block, and of this process, nothing of the group is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also what a leader that is gone left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _die_with_parent() -> None:
    """In the child: a check that is killed leaves nobody behind that uses the device; and no file of its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as an interrupt does: through `finally`, which ends its children."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-LOG_CHARACTERS:] if log.exists() else ""
