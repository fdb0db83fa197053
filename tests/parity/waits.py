"""Every place of the engine that waits for an event, or notes one for others to wait for, read from its source.

Each has a name, its site, in a comment `# site NAME` that ends its line or has the line before to itself: it stays when
files, functions and variables are renamed, and costs a run nothing.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.runtime import events as runtime_events
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DONE, Event, Streams, Work, all_of
from penstock.tiers.storage import MemoryEvents

PACKAGE = Path(penstock.__file__).parent
# What measures a machine, and what only notes waits, orders nothing of an engine's.
ORDERS_NOTHING = ("runtime/", "probe/", "planner/", "ext/observe/")
ALL = "#all"  # of `all_of(events)`
REST = "+"  # `all_of([event, event, *rest])`: its entries are #0, #1 and #2+, as the last of any list is
NOTE = "#note"  # of what a home is told
FAILURES = ("DONE", "FailedEvent", "TornEvent")  # nothing to wait for
SITES = re.compile(r"# site ([\w.]+(?:, [\w.]+)*)(?:: .*)?$")


@dataclass(frozen=True)
class Wait:
    """A place that waits.

    Attributes:
        site: its name.
        place: `file:line` and which event, as `NotedWaits` or `AllOf` tells it while it runs.
    """

    site: str
    place: str


def waits() -> tuple[Wait, ...]:
    """`event.wait()`, `event.synchronize()`, what `submit` and `all_of` wait for, and what homes are told to keep."""
    return _read()[0]


def complaints() -> list[str]:
    """Waits without a name, names without a wait, and names that are given twice."""
    return _read()[1]


@cache
def _read() -> tuple[tuple[Wait, ...], list[str]]:
    found: list[Wait] = []
    wrong: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.relative_to(PACKAGE).as_posix().startswith(ORDERS_NOTHING):
            waits_there, wrong_there = read_file(path)
            found += waits_there
            wrong += wrong_there
    sites = [wait.site for wait in found]
    wrong += [f"{site} names several waits" for site in sorted({site for site in sites if sites.count(site) > 1})]
    return tuple(found), wrong


def read_file(path: Path) -> tuple[list[Wait], list[str]]:
    """The waits of a file, and what is wrong with their names."""
    text = path.read_text()
    places = defaultdict(list)  # by the line that names them: (column, place)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (entries := list(_entries(node))):
            # A call of several lines is named where it says what it waits for.
            named = next((k.value for k in node.keywords if _verb(node) == "submit" and k.arg == "after"), node)
            places[named.lineno] += [(named.col_offset, f"{path}:{node.lineno}{entry}") for entry in entries]
    names = _names(text) if "# site" in text else {}
    found, wrong = [], []
    for line in sorted({*places, *names}):
        there = [place for _, place in sorted(places[line], key=lambda each: each[0])]
        sites = names.get(line, [])
        if len(sites) != len(there):
            wrong.append(f"{path}:{line}: {len(there)} events, sites {sites}: name each by `# site NAME, NAME`")
            sites = there
        found += [Wait(site, place) for site, place in zip(sites, there, strict=True)]
    return found, wrong


def _names(text: str) -> dict[int, list[str]]:
    """The sites that each line of code is given, by a comment at its end or by one before it."""
    found, above = {}, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        named = SITES.match(token.string) if token.type == tokenize.COMMENT else None
        if named is not None and token.line.lstrip().startswith("#"):
            above = named[1].split(", ")
        elif named is not None:
            found[token.start[0]] = named[1].split(", ")
        elif above and token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            found[token.start[0]], above = above, []
    return found


def _verb(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _entries(call: ast.Call) -> Iterator[str]:
    """What each event that a call waits for adds to the call's place."""
    verb = _verb(call)
    if verb in ("wait", "synchronize") and not call.args and not call.keywords:
        if isinstance(call.func, ast.Attribute) and not isinstance(
            call.func.value, ast.Call
        ):  # a transfer that is waited for where it is started
            yield ""
    elif verb == "submit":
        for after in (keyword.value for keyword in call.keywords if keyword.arg == "after"):
            yield from (f"#{index}" for index in range(len(after.elts) if isinstance(after, ast.Tuple) else 1))
    elif verb in ("note_write", "note_read", "buffer_storage"):
        noted = call.args[0] if verb != "buffer_storage" else call.keywords[0].value if call.keywords else None
        if noted is not None and not ast.unparse(noted).startswith(FAILURES):
            yield NOTE
    elif verb == "all_of":
        (events,) = call.args
        if isinstance(events, ast.List):
            last = len(events.elts) - 1
            yield from (f"#{index}{REST * (index == last)}" for index in range(last + 1))
        else:
            yield ALL


class NotedWaits(Streams):
    """Streams whose waits are known by their place, and that can leave one of them out.

    Attributes:
        dropped: `file:line` of the wait that is left out, with `#index` for an entry of `after`.
        seen: the places that waited.
    """

    dropped: str | None
    seen: set[str]

    def keeps(self, place: str) -> bool:
        """Note a wait; return True if it is to be done."""
        self.seen.add(place)
        return place != self.dropped

    def submit(self, stream: str, work: Work, *, after: Sequence[Event] = (), **rest: Any) -> Event:
        place = _place(2)
        kept = [event for index, event in enumerate(after) if self.keeps(f"{place}#{index}")]
        # The streams get the events themselves: what they wait for is no wait of the program's.
        after = [part.unwatched() for event in kept for part in event.parts()]
        return _NotedEvent(super().submit(stream, work, after=after, **rest), self)


class _NotedEvent(Event):
    """An event whose waits are noted."""

    def __init__(self, event: Event, streams: NotedWaits) -> None:
        self._event, self._streams = event, streams

    def wait(self) -> None:
        if self._streams.keeps(_place(2)):
            self._event.wait()

    def synchronize(self) -> None:
        if self._streams.keeps(_place(2)):
            self._event.synchronize()

    def done(self) -> bool:
        return self._event.done()

    def check(self) -> None:
        self._event.check()

    def unwatched(self) -> Event:
        return self._event


def _place(depth: int) -> str:
    """The line that waits: not the one of an event of several, which waits for each."""
    frame: Any = sys._getframe(depth)
    while frame.f_code.co_filename == runtime_events.__file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class DroppingStreams(NotedWaits, SimulatedStreams):
    """Simulated streams that can leave a wait out."""

    def __init__(self, delay: Callable[[str, int], float], dropped: str | None = None) -> None:
        super().__init__(delay)
        self.dropped, self.seen = dropped, set()


class Notes:
    """Has homes not hear of the event that a place notes."""

    def __init__(self, dropped: str | None) -> None:
        self._dropped = dropped
        self.seen: set[str] = set()

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between those who note and the homes, until the patch is undone."""
        for method in ("write", "add_read", "__init__"):
            patch.setattr(MemoryEvents, method, self._between(getattr(MemoryEvents, method)))

    def _between(self, note: Callable[[MemoryEvents, Event], None]) -> Callable[[MemoryEvents, Event], None]:
        storages = note.__code__.co_filename  # type: ignore[attr-defined]

        def heard(events: MemoryEvents, event: Event) -> None:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_filename == storages:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}{NOTE}"
            self.seen.add(place)
            note(events, DONE if place == self._dropped else event)

        return heard


class AllOf:
    """`all_of` without the events that a place names."""

    def __init__(self, dropped: str | None) -> None:
        self._dropped = dropped
        self.seen: set[str] = set()

    def __call__(self, events: Iterable[Event]) -> Event:
        frame = sys._getframe(1)
        call = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        kept = list(events)
        without = {ALL: kept[:0]}
        for index in range(len(kept) + 1):
            without |= {f"#{index}": kept[:index] + kept[index + 1 :], f"#{index}{REST}": kept[:index]}
        self.seen |= {call + part for part in without}
        return all_of(next((left for part, left in without.items() if call + part == self._dropped), kept))


def listen(patch: pytest.MonkeyPatch, dropped: str | None) -> tuple[AllOf, Notes]:
    """Leave out what a place waits for or notes, wherever `all_of` and homes are used, until the patch is undone."""
    together, notes = AllOf(dropped), Notes(dropped)
    notes.listen(patch)
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock.") and not name.startswith("penstock.runtime.") and hasattr(module, "all_of"):
            patch.setattr(module, "all_of", together)
    return together, notes
