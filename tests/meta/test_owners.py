"""What one module owns, no other writes: read from the source."""

import ast
from collections.abc import Iterator

import pytest

from tests.meta.source import modules

HOLDING = "engine.unit.unit"
PARAMETERS = ("engine.unit.parameter", "engine.unit.dtensor")


def written(tree: ast.Module) -> Iterator[ast.expr]:
    """What is assigned to, added to or deleted, anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield ast.Attribute(node.args[0], "?", lineno=node.lineno)


def is_called(node: ast.expr, name: str) -> bool:
    """Whether an expression is `name`, or an attribute of that name."""
    return getattr(node, "id", getattr(node, "attr", None)) == name


@pytest.mark.parametrize("module", [m for m in modules() if m != HOLDING])
def test_nobody_else_writes_who_holds_a_unit(module: str) -> None:
    for target in written(modules()[module]):
        if isinstance(target, ast.Attribute):
            assert not is_called(target.value, "holding"), f"penstock.{module}, line {target.lineno}"


@pytest.mark.parametrize(
    "module", [m for m in modules() if m.startswith(("engine", "construct")) and m not in PARAMETERS]
)
def test_nobody_else_gives_a_parameter_other_memory(module: str) -> None:
    for target in written(modules()[module]):
        if isinstance(target, ast.Attribute) and target.attr == "data":
            assert is_called(target.value, "_counter"), f"penstock.{module}, line {target.lineno}"
