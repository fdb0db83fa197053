"""Docstrings of functions begin with a verb, so that a reader knows what a call does before reading the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.source import modules, nodes_of, place

#: The verbs that a docstring may begin with, in the imperative. Add yours; a word that is no verb does not belong here.
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())


def documented(module: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Give the functions of a module that have a docstring and do something when called: no properties, no dunders."""
    for node in nodes_of(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        text = ast.get_docstring(node)
        if text and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node, text


def begins_with_a_verb(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> bool:
    """Return whether a docstring begins with a verb, or says what a function that returns a bool tells."""
    first, second, *_ = [*text.split(), "", ""]
    if first == "Whether":
        return node.returns is not None and ast.unparse(node.returns) == "bool"
    # "Copy of the buffer" and "Share of the bytes" are nouns.
    return first.rstrip(".,;").lower() in VERBS and first[:1].isupper() and second != "of"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = ((module, node, text) for module in modules() for node, text in documented(module))
    wrong = [
        f"{place(m, node)}: {text.splitlines()[0]}" for m, node, text in found if not begins_with_a_verb(node, text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("def f() -> None:\n    '''Give the memory back.'''", True),
        ("def f() -> bool:\n    '''Whether it is over.'''", True),
        ("def f() -> None:\n    '''Whether it is over.'''", False),
        ("def f() -> None:\n    '''All tiles of a unit were submitted.'''", False),
        ("def f() -> None:\n    '''Copy of a buffer.'''", False),
        ("def f() -> None:\n    '''Returns the name.'''", False),
    ],
)
def test_a_noun_is_told_from_a_verb(source: str, passes: bool) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert begins_with_a_verb(node, ast.get_docstring(node) or "") is passes
