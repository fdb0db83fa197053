"""Every place of the engine that waits for an event, read from its source."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import penstock
from penstock.machine.streams import DONE, Event, all_of
from penstock.tiers.home import Home
from penstock.tiers.transit import Transit

PACKAGE = Path(penstock.__file__).parent
HELPERS = ("_copy", "_copy_all")  # pass on what they wait for, their fourth argument
VERBS = ("wait", "synchronize", "submit", "copy", "all_of", *HELPERS)
ALL = "#all"  # of `all_of(events)`
REST = "+"  # `all_of([event, event, *rest])`: its entries are #0, #1 and #2+, as the last of any list is
AFTER = "#after"  # of `Transit.copy`


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
    """`event.wait()`, `event.synchronize()`, and what `submit` and `all_of` wait for, below penstock/ but machine/."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "machine":
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
    elif verb in HELPERS and function not in HELPERS:
        yield from _after(call, call.args[3])
    elif verb == "submit" and function not in HELPERS:
        for keyword in call.keywords:
            if keyword.arg == "after":
                yield from _after(call, keyword.value)
    elif verb == "copy" and call.keywords:  # of homes
        (after,) = (keyword for keyword in call.keywords if keyword.arg == "after")
        if ast.unparse(after.value) != "DONE":
            yield f"copy of {ast.unparse(call.args[0])} after {ast.unparse(after.value)}", AFTER
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


class Copy:
    """`Transit.copy` that does not wait where a site names it."""

    def __init__(self, dropped: str | None) -> None:
        self._dropped = dropped
        self._copy = Transit.copy
        self.seen: set[str] = set()

    def __get__(self, transit: Transit, cls: type[Transit]) -> Callable[..., Event]:
        return partial(self, transit)

    def __call__(self, transit: Transit, source: Home, target: Home, *, after: Event, what: str = "") -> Event:
        frame = sys._getframe(1)
        site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{AFTER}"
        self.seen.add(site)
        return self._copy(transit, source, target, after=DONE if site == self._dropped else after, what=what)


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
