"""What the library consists of stays small: functions, constructors, packages, words, private names of torch.

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
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from penstock.integrations._private import accelerate, lightning, transformers, trl
from tests.meta.source import modules, nodes_of, path_of, place

MOST_OF_A_FUNCTION, MOST_ARGUMENTS = 60, 8

# What is larger, and why.
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
OF_PYTHON = frozenset(f"?.{name}" for name in ("_DummyThread", "_asdict", "_exit", "_getframe", "_value_"))
LISTED = (accelerate.NAMES, lightning.NAMES, transformers.NAMES, trl.NAMES)
OF_OTHERS = OF_PYTHON | {f"?.{row.rpartition('.')[2]}" for names in LISTED for row in names}
#: Names of ours that objects of torch have as well.
OURS = {"_name", "_native"}


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


def arguments(node: ast.ClassDef) -> int:
    """What the constructor of a class is given: its arguments, or the fields without default of a dataclass."""
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        # A field with another key in JSON has metadata, and no default.
        return sum(field.value is None or ast.unparse(field.value).startswith("field(metadata") for field in fields)
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            return len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
    return 0


def too_large() -> dict[str, str]:
    """What is above a limit, by its name: its place and its size."""
    found = {}
    for module in modules():
        for node in nodes_of(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = len(lines_of_code(module) & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                limit = MOST_OF_A_FUNCTION
            elif isinstance(node, ast.ClassDef):
                size, limit = arguments(node), MOST_ARGUMENTS
            else:
                continue
            if size > limit:
                found[f"{module}.{node.name}"] = f"{place(module, node)}: {size} of {limit}"
    return found


def test_no_function_and_no_constructor_is_too_large_but_the_exceptions() -> None:
    found = too_large()
    others = [where for name, where in found.items() if name not in LARGE]
    assert not others, "\n".join(others)
    assert LARGE.keys() <= found.keys(), "these are small enough: take them off the list"


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
def of_torch() -> set[str]:
    """Private names of torch's objects, as their instances have them, and those of the table."""
    things = (
        *(torch, torch.Tensor, torch.UntypedStorage, torch.ops.aten.add.Tensor, DTensor, distributed_c10d),
        *(nn.Module(), nn.LSTM(1, 1), torch.optim.SGD([torch.ones(1)]), torch.optim.lr_scheduler.LRScheduler),
    )
    return {name for thing in things for name in dir(thing) if is_private(name)} - OURS | IN_TABLE


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


def chain(node: ast.expr) -> tuple[str, list[str]]:
    """The name that attributes are asked of, `""` where it is none, and the attributes in order."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return getattr(node, "id", ""), parts


def names_of_torch(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """What of torch the names of a module stand for."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            of = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            found |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in of}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            root, parts = chain(node.value)
            if root in found and isinstance(target, ast.Name):
                found[target.id] = ".".join([found[root], *parts])
    return found


def private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Private names that a module uses of others: whole where it says of what, else `?.name`."""
    bound = names_of_torch(nodes)
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            root, parts = chain(node)
            if root in bound and node not in inner and any(map(is_private, parts)):
                yield ".".join([bound[root], *parts])
            elif root not in bound and is_foreign(node.attr, asked_of_self=is_self(node.value)):
                yield f"?.{node.attr}"
        elif isinstance(node, ast.Constant) and node.value in IN_TABLE:
            yield f"?.{node.value}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKING:
            asked = getattr(node.args[1], "value", None)
            if isinstance(asked, str) and is_foreign(asked, asked_of_self=is_self(node.args[0])):
                yield f"?.{asked}"
        yield from (name for name in named if name.startswith("torch.") and any(map(is_private, name.split("."))))


def is_foreign(name: str, *, asked_of_self: bool) -> bool:
    """Whether a private name that is asked of some object is none of ours."""
    return is_private(name) and (name not in of_ours() or (name in of_torch() and not asked_of_self))


def rows_of(name: str) -> set[str]:
    """The rows of the table that a use is of."""
    return {row for row in ROWS if f"{name}.".startswith(f"{row}.") or (name[0] == "?" and row.endswith(name[1:]))}


@cache
def used() -> Mapping[str, Sequence[str]]:
    """The private names of others that the package uses, with the modules that do."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in set(private_names(nodes_of(module))):
            found.setdefault(name, []).append(module)
    return found


def test_private_names_of_torch_are_in_the_table() -> None:
    known = OF_OTHERS | {name for name in used() if rows_of(name)}
    known |= {name for name in used() if any(row.startswith(f"{name}.") for row in ROWS)}  # on the way to one
    missing = {name: where for name, where in used().items() if name not in known}
    assert missing == {}, (
        "take a public name, or add one to private_names.toml: why, read in the oldest and the newest torch"
    )


def test_every_row_of_private_names_is_used() -> None:
    assert ROWS - {row for name in used() for row in rows_of(name)} == set(), (
        "take these rows out of private_names.toml"
    )
    assert OF_PYTHON - used().keys() == set(), "take these names out of OF_PYTHON"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._anything()", {"torch._C._anything"}),
        ("from torch import nn\nnn.modules.module._anything", {"torch.nn.modules.module._anything"}),
        ("from torch._anything import public", {"torch._anything.public"}),
        ("import torch\nalias = torch.autograd.graph\nalias._anything", {"torch.autograd.graph._anything"}),
        ("tensor._anything_of_torch", {"?._anything_of_torch"}),
        ("self._anything_of_torch", {"?._anything_of_torch"}),
        ("module._forward_hooks", {"?._forward_hooks"}),
        ("getattr(module, '_anything_of_torch', None)", {"?._anything_of_torch"}),
        ("HOOKS = ('_forward_hooks',)", {"?._forward_hooks"}),
        ("import torch\ntorch.add(a, b).__class__", set()),
        ("self._segments", set()),
    ],
)
def test_private_names_are_found(source: str, found: set[str]) -> None:
    assert set(private_names(tuple(ast.walk(ast.parse(source))))) == found
