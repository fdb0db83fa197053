"""The texts that the package can say, and whether a page's quotation is one of them.

A text is known by what is constant in it: the values of an f-string, and `%s` of a line of the log, are gaps. A
quotation on a page writes `...` for its own gaps.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.meta.source import modules

GAP = "\0"
QUOTED = "..."
_LOGGED = re.compile(r"%[sdr]")


@cache
def texts() -> tuple[str, ...]:
    """Every text of the package, docstrings apart, its values as gaps."""
    return tuple(text for tree in modules().values() for text in _texts_of(tree))


def warnings_said() -> list[str]:
    """What is given to `warnings.warn` and to a logger's `warning`, without those that are gaps alone."""
    found = []
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith((".warn", ".warning")):
                text = _LOGGED.sub(GAP, _text(node.args[0]))
                if re.search(r"[a-z]{3}", text):
                    found.append(text)
    return found


def says(text: str, quotation: str) -> bool:
    """Whether what is constant in a quotation is in a text, in order."""
    parts = [part.strip() for part in quotation.split(QUOTED) if part.strip(" .")]
    place = 0
    for part in parts:
        place = text.find(part, place) + len(part)
        if place < len(part):
            return False
    return bool(parts)


def can_be_said(quotation: str) -> bool:
    """Whether the package has a text that the quotation is of."""
    return any(says(text, quotation) for text in texts())


def _texts_of(tree: ast.Module) -> Iterator[str]:
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in told | inner and _text(node):
            yield _LOGGED.sub(GAP, _text(node))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP
