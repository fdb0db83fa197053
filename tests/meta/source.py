"""The package as text: its modules, what each imports, and what it does at module level."""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "penstock"


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees by dotted name below `penstock`; the package itself is `""`, native code `_native`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts)] = ast.parse(path.read_text(), str(path))
    return found


def path_of(module: str) -> Path:
    """The file of a module."""
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def place(module: str, node: ast.AST | None = None) -> str:
    """The file of a module, and the line of a node, as terminals open them."""
    return f"{path_of(module).relative_to(PACKAGE.parents[1])}:{getattr(node, 'lineno', 1)}"


@cache
def nodes_of(module: str) -> Sequence[ast.AST]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(modules()[module]))


@cache
def imports(module: str) -> Sequence[str]:
    """Modules of the package that a module imports, anywhere in it, by the names of `modules`.

    `from penstock import x` is `x` where that is a module, else the package itself.
    """
    found = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            base = node.module or ""
            names = []
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("penstock.") in modules() or inner == "penstock._native"
                names.append(inner if is_module else base)
        else:
            continue
        of_ours = (name for name in names if name.partition(".")[0] == "penstock")
        found += [name.removeprefix("penstock").removeprefix(".") for name in of_ours]
    return found
