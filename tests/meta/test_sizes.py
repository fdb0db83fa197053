"""What the library consists of stays small: functions, dataclasses, packages, words, private names of torch.

How many arguments a function may have is in `pyproject.toml`, which ruff keeps.

Code is counted without blanks, comments and docstrings. The budget of a package is what there is, exactly. A change
that makes the house smaller lowers it, so that nothing grows back unseen; one that needs more raises it, and its commit
says why.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from penstock.integrations._private import accelerate, lightning, transformers, trl
from tests.meta.source import modules, nodes_of, path_of, place

MOST_OF_A_FUNCTION, MOST_FIELDS = 60, 8

#: Dataclasses that take more fields, and why.
LARGE = {
    "engine.step.context.EngineContext": "what all components share, in place of copies in each",
    "engine.unit.partition.UnitSpec": "what belongs to a unit, told in one place",
    "checkpoint.format.Manifest": "the fields of the file",
    "checkpoint.tables.UnitTable": "the fields of the file",
    "planner.plans.Plan": "the fields of the file, and what people read of a plan",
}

ROOT = Path(__file__).parents[2]
TO_DO = "Lower the budget if the house got smaller; to grow needs a reason in the same commit. There is now:"

#: Code lines and modules of each package; `__init__.py` has lines and is no module.
PACKAGES = {
    "(top)": (3100, 20),
    "checkpoint": (2079, 10),
    "cli": (1936, 20),
    "doctor": (214, 1),
    "engine": (6834, 29),
    "ext": (2879, 13),
    "integrations": (3737, 38),
    "runtime": (2393, 14),
    "optim": (457, 6),
    "planner": (4734, 29),
    "probe": (732, 6),
    "rules": (1578, 9),
    "tiers": (1544, 7),
    "train": (1897, 14),
}
#: Lines of C++ and files of `csrc`.
NATIVE = (2321, 16)
#: Rows of the table of words in `docs/design.md`.
WORDS = 32

#: Private names of torch that may be used: each says why, and the file which versions of torch it was read in.
TORCH = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text())
ROWS = frozenset(f"{owner}.{name}" for owner, names in TORCH.items() for name in names)
IN_TABLE = frozenset(row.rpartition(".")[2] for row in ROWS)
#: Private names of Python, and of the libraries that penstock.integrations lists.
OF_PYTHON = {"_DummyThread", "_asdict", "_exit", "_getframe", "_value_"}
LISTED = (accelerate.NAMES, lightning.NAMES, transformers.NAMES, trl.NAMES)
OF_OTHERS = OF_PYTHON | {row.rpartition(".")[2] for names in LISTED for row in names}


@cache
def lines_of_code(module: str) -> frozenset[int]:
    """The numbers of the lines that are no blanks, comments and docstrings."""
    lines = dict(enumerate(map(str.strip, path_of(module).read_text().splitlines()), 1))
    for node in nodes_of(module):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node, clean=False) is not None:
            for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                lines.pop(number, None)
    return frozenset(number for number, line in lines.items() if line and not line.startswith("#"))


def test_no_function_is_too_large() -> None:
    functions = (
        (module, node, set(range(node.lineno, (node.end_lineno or 0) + 1)))
        for module in modules()
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = {place(module, node): len(lines_of_code(module) & lines) for module, node, lines in functions}
    assert {where: size for where, size in sizes.items() if size > MOST_OF_A_FUNCTION} == {}


def fields(node: ast.AST) -> int:
    """How many fields without default a dataclass has; one with another key in JSON has metadata, and no default."""
    if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return 0
    made = [each.value for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum(value is None or ast.unparse(value).startswith("field(metadata") for value in made)


def test_no_dataclass_is_too_large_but_the_exceptions() -> None:
    found = {f"{module}.{node.name}" for module in modules() for node in nodes_of(module) if fields(node) > MOST_FIELDS}
    assert found == LARGE.keys()


def packages() -> dict[str, tuple[int, int]]:
    """Code lines and modules by package."""
    found: dict[str, tuple[int, int]] = {}
    for module in modules():
        is_package = path_of(module).name == "__init__.py"
        name = module.split(".")[0] if module and (is_package or "." in module) else "(top)"
        lines, count = found.get(name, (0, 0))
        found[name] = lines + len(lines_of_code(module)), count + (not is_package)
    return found


def native() -> tuple[int, int]:
    """Lines of C++ that are neither blank nor a comment of their own, and files."""
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    lines = [line.strip() for path in files for line in path.read_text().splitlines()]
    return sum(bool(line) and not line.startswith(("//", "/*", "*")) for line in lines), len(files)


def test_each_package_has_its_budget_of_lines_and_modules() -> None:
    found = packages()
    changed = [f'"{name}": {found.get(name)},' for name in {*found, *PACKAGES} if found.get(name) != PACKAGES.get(name)]
    assert changed == [], "\n".join([TO_DO, *sorted(changed)])


def test_native_code_has_its_budget_of_lines_and_files() -> None:
    assert native() == NATIVE, f"{TO_DO} NATIVE = {native()}"


def test_the_table_of_words_has_its_budget() -> None:
    table = re.search(
        r"^\| word \| meaning \|\n\| --- \| --- \|\n((?:\|.*\n)+)", (ROOT / "docs/design.md").read_text(), re.M
    )
    assert table is not None
    rows = table[1].count("\n")
    assert rows == WORDS, f"{TO_DO} WORDS = {rows}"


# Private names


ASKING = ("getattr", "hasattr", "setattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


@cache
def of_ours() -> set[str]:
    """Names that the package defines."""
    found = set()
    for node in (node for module in modules() for node in nodes_of(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return getattr(node, "id", "") in ("self", "cls")


def names_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that a module imports from others, asks objects for, or has as a string that the table knows."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "penstock":
            yield from (*(node.module or "").split("."), *(alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKING:
            yield str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.Constant) and node.value in IN_TABLE:
            yield node.value


@cache
def used() -> Mapping[str, Sequence[str]]:
    """The names that the package uses, with the modules that do."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in set(names_in(nodes_of(module))):
            found.setdefault(name, []).append(module)
    return found


def test_private_names_of_torch_are_in_the_table() -> None:
    known = of_ours() | OF_OTHERS | {part for row in ROWS for part in row.split(".")}
    missing = {name: where for name, where in used().items() if is_private(name) and name not in known}
    assert missing == {}, (
        "take a public name, or add one to private_names.toml: why, read in the oldest and the newest torch"
    )


def test_every_row_of_private_names_is_used() -> None:
    assert IN_TABLE - used().keys() == set(), "take these rows out of private_names.toml"
    assert OF_PYTHON - used().keys() == set(), "take these names out of OF_PYTHON"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._anything()", {"_C", "_anything"}),
        ("from torch._anything import public", {"_anything"}),
        ("from torch import _anything", {"_anything"}),
        ("self._anything", {"_anything"}),
        ("getattr(module, '_anything', None)", {"_anything"}),
        ("HOOKS = ('_forward_hooks',)", {"_forward_hooks"}),
        ("import torch\ntorch.add(a, b).__class__", set()),
        ("from penstock.optim._own import _name", set()),
    ],
)
def test_private_names_are_found(source: str, found: set[str]) -> None:
    assert set(filter(is_private, names_in(tuple(ast.walk(ast.parse(source)))))) == found
