"""What one module owns, no other writes: read from the source."""

import ast
from collections.abc import Iterator

from tests.meta.source import modules, nodes_of, place

HOLDING = "engine.unit.unit"
PARAMETERS = ("engine.unit.parameter", "engine.unit.dtensor")


def written(module: str) -> Iterator[ast.expr]:
    """What is assigned to, added to or deleted, anywhere in a module."""
    for node in nodes_of(module):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield ast.Attribute(node.args[0], "?", lineno=node.lineno)


def is_called(node: ast.expr, name: str) -> bool:
    """Whether an expression is `name`, or an attribute of that name."""
    return getattr(node, "id", getattr(node, "attr", None)) == name


def test_nobody_else_writes_who_holds_a_unit() -> None:
    wrong = [
        place(module, target)
        for module in modules()
        for target in written(module)
        if isinstance(target, ast.Attribute) and is_called(target.value, "holding") and module != HOLDING
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_else_gives_a_parameter_other_memory() -> None:
    wrong = [
        place(module, target)
        for module in modules()
        if module.startswith(("engine", "construct")) and module not in PARAMETERS
        for target in written(module)
        if isinstance(target, ast.Attribute) and target.attr == "data" and not is_called(target.value, "_counter")
    ]
    assert not wrong, "\n".join(wrong)
