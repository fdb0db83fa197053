"""The package as text: its modules, what each imports, and what it does at module level."""

import ast
from collections.abc import Iterator
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


def imports(module: str) -> Iterator[str]:
    """Modules of the package that a module imports, anywhere in it, by the names of `modules`.

    `from penstock import x` is `x` where that is a module, else the package itself.
    """
    known = {*modules(), "_native"}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            base = node.module or ""
            names = []
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.append(inner if inner.removeprefix("penstock.") in known else base)
        else:
            continue
        for name in names:
            if name == "penstock":
                yield ""
            elif name.startswith("penstock."):
                yield name.removeprefix("penstock.")
