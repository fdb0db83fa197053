"""Every place of the engine that waits for an event, read from its source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent


@dataclass(frozen=True)
class Wait:
    """A place that waits.

    Attributes:
        name: file, function and what is waited for: stable when lines move.
        site: as `SimulatedStreams` names it.
    """

    name: str
    site: str


def waits() -> list[Wait]:
    """`event.wait()`, `event.synchronize()`, and each entry of `submit(after=...)`, below penstock/ but machine/."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "machine":
            found += _waits_of(path)
    names = [wait.name for wait in found]
    assert len(set(names)) == len(names), "two waits of one function look alike: name their events apart"
    return found


def _waits_of(path: Path) -> Iterator[Wait]:
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        inside = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
        function = max(inside, key=lambda f: f.lineno).name if inside else ""
        site = f"{path.name}:{node.lineno}"
        if node.func.attr in ("wait", "synchronize") and not node.args and not node.keywords:
            yield Wait(f"{path.name} {function}: {ast.unparse(node)}", site)
        elif node.func.attr == "submit":
            for keyword in node.keywords:
                if keyword.arg == "after":
                    entries = keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]
                    for index, entry in enumerate(entries):
                        yield Wait(f"{path.name} {function}: after {ast.unparse(entry)}", f"{site}#{index}")
