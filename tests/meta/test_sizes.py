"""Functions and constructors stay small. Code is counted without blanks, comments and docstrings."""

import ast
import io
import tokenize
from collections.abc import Iterator

import pytest

from tests.meta.source import PACKAGE, modules

MOST_OF_A_FUNCTION, MOST_ARGUMENTS = 60, 8

# What is larger, and why.
FUNCTIONS: dict[str, str] = {}
CONSTRUCTORS = {
    "blueprint.Request": "what the user asked for, as it is named there",
    "engine.units.discover.UnitSpec": "what belongs to a unit, told in one place",
    "checkpoint.manifest.Manifest": "the fields of the file",
    "cli.training.reporting.progress.Progress": "the fields of the file",
    "forecast.answer.Answer": "the fields of the file, and what people read of a plan",
    "cli.training.request.Request": "what the user asked for, and what follows from it before the data is read",
}
UNCOUNTED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def text_of(module: str) -> str:
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def lines_of_code(module: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text_of(module)).readline)
    lines = {line for t in tokens if t.type not in UNCOUNTED for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def arguments(node: ast.ClassDef) -> int:
    """What the constructor of a class is given: its arguments, or the fields without default of a dataclass."""
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return sum(isinstance(field, ast.AnnAssign) and field.value is None for field in node.body)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            return len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
    return 0


def too_large(module: str) -> Iterator[tuple[str, str, int]]:
    """What is above a limit: of which kind, its name, its size."""
    code = lines_of_code(module)
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = len(code & set(range(node.lineno, (node.end_lineno or 0) + 1)))
            if size > MOST_OF_A_FUNCTION:
                yield "function", f"{module}.{node.name}", size
        if isinstance(node, ast.ClassDef) and arguments(node) > MOST_ARGUMENTS:
            yield "constructor", f"{module}.{node.name}", arguments(node)


EXCEPTIONS = {"function": FUNCTIONS, "constructor": CONSTRUCTORS}


@pytest.mark.parametrize("module", modules())
def test_nothing_is_too_large(module: str) -> None:
    found = [(kind, name, size) for kind, name, size in too_large(module) if name not in EXCEPTIONS[kind]]
    assert found == []


def test_every_exception_is_one() -> None:
    found = {(kind, name) for module in modules() for kind, name, _ in too_large(module)}
    listed = {(kind, name) for kind, names in EXCEPTIONS.items() for name in names}
    assert listed <= found, "these are small enough: take them off the lists"
