"""Every place of the engine that waits for an event, or notes one for others to wait for, read from its source."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.machine.streams import DONE, Event, all_of
from penstock.tiers.home import MemoryEvents

PACKAGE = Path(penstock.__file__).parent
VERBS = ("wait", "synchronize", "submit", "all_of", "note_write", "note_read", "buffer_home")
ALL = "#all"  # of `all_of(events)`
REST = "+"  # `all_of([event, event, *rest])`: its entries are #0, #1 and #2+, as the last of any list is
NOTE = "#note"  # of what a home is told
FAILURES = ("DONE", "FailedEvent", "TornEvent")  # nothing to wait for


@dataclass(frozen=True)
class Wait:
    """A place that waits.

    Attributes:
        name: file, function and what is waited for: stable when lines move.
        site: as `SimulatedStreams` or `AllOf` names it.
    """

    name: str
    site: str


@cache
def waits() -> tuple[Wait, ...]:
    """`event.wait()`, `event.synchronize()`, what `submit` and `all_of` wait for, and what homes are told to keep."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # What measures a machine, and what only notes waits, orders nothing of an engine's.
        if path.parent.name not in ("machine", "probe", "rehearsal", "forecast", "planner"):
            found += _waits_of(path)
    names = [wait.name for wait in found]
    assert len(set(names)) == len(names), "two waits of one function look alike: name their events apart"
    return tuple(found)


def _waits_of(path: Path) -> Iterator[Wait]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    for node in nodes:
        if not isinstance(node, ast.Call) or _verb(node) not in VERBS:
            continue
        inside = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
        function = max(inside, key=lambda f: f.lineno).name if inside else ""
        site = f"{path.name}:{node.lineno}"
        for what, entry in _entries(node, function):
            yield Wait(f"{path.name} {function}: {what}", f"{site}{entry}")


def _verb(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _entries(call: ast.Call, function: str) -> Iterator[tuple[str, str]]:
    """What a call waits for, and what that adds to the call's site."""
    verb = _verb(call)
    if verb in ("wait", "synchronize") and not call.args and not call.keywords:
        if isinstance(call.func, ast.Attribute) and not isinstance(
            call.func.value, ast.Call
        ):  # a transfer that is waited for where it is started
            yield ast.unparse(call), ""
    elif verb == "submit":
        for keyword in call.keywords:
            if keyword.arg == "after":
                yield from _after(call, keyword.value)
    elif verb in ("note_write", "note_read", "buffer_home"):
        noted = call.args[0] if verb != "buffer_home" else call.keywords[0].value if call.keywords else None
        if noted is not None and not ast.unparse(noted).startswith(FAILURES):
            yield ast.unparse(call), NOTE
    elif verb == "all_of":
        (events,) = call.args
        if isinstance(events, ast.List):
            *firsts, rest = events.elts
            for index, event in enumerate(firsts):
                yield f"all of {ast.unparse(event)}", f"#{index}"
            yield f"all of {ast.unparse(rest)}", f"#{len(firsts)}{REST}"
        else:
            yield f"all of {ast.unparse(events)}", ALL


def _after(call: ast.Call, value: ast.expr) -> Iterator[tuple[str, str]]:
    entries = value.elts if isinstance(value, ast.Tuple) else [value]
    for index, entry in enumerate(entries):
        others = f" of {ast.unparse(value)}" if len(entries) > 1 else ""
        yield f"{ast.unparse(call.args[0])} after {ast.unparse(entry)}{others}", f"#{index}"


class Notes:
    """Has homes not hear of the event that a site notes."""

    def __init__(self, dropped: str | None) -> None:
        self._dropped = dropped
        self.seen: set[str] = set()

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between those who note and the homes, until the patch is undone."""
        for method in ("write", "add_read", "__init__"):
            patch.setattr(MemoryEvents, method, self._between(getattr(MemoryEvents, method)))

    def _between(self, note: Callable[[MemoryEvents, Event], None]) -> Callable[[MemoryEvents, Event], None]:
        def heard(events: MemoryEvents, event: Event) -> None:
            frame: Any = sys._getframe(1)
            while Path(frame.f_code.co_filename).name == "home.py":
                frame = frame.f_back
            site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{NOTE}"
            self.seen.add(site)
            note(events, DONE if site == self._dropped else event)

        return heard


class AllOf:
    """`all_of` without the events that a site names."""

    def __init__(self, dropped: str | None) -> None:
        self._dropped = dropped
        self.seen: set[str] = set()

    def __call__(self, events: Iterable[Event]) -> Event:
        frame = sys._getframe(1)
        site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        kept = list(events)
        without = {ALL: kept[:0]}
        for index in range(len(kept) + 1):
            without |= {f"#{index}": kept[:index] + kept[index + 1 :], f"#{index}{REST}": kept[:index]}
        self.seen |= {site + part for part in without}
        return all_of(next((left for part, left in without.items() if site + part == self._dropped), kept))


def listen(patch: pytest.MonkeyPatch, dropped: str | None) -> tuple[AllOf, Notes]:
    """Leave out what a site waits for or notes, wherever `all_of` and homes are used, until the patch is undone."""
    together, notes = AllOf(dropped), Notes(dropped)
    notes.listen(patch)
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock.") and not name.startswith("penstock.machine.") and hasattr(module, "all_of"):
            patch.setattr(module, "all_of", together)
    return together, notes
