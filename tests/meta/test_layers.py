"""Arrows between modules point down only, as the design page draws them."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.meta.source import imports, modules

LAYERS = (
    (
        "errors",
        "kinds",
        "config",
        "layout",
        "split",
        "plan",
        "trace",
        "optim",
        "losses",
        "_native",
    ),  # values and arithmetic
    ("machine", "rules"),
    ("tiers",),
    ("checkpoint", "planner"),
    ("engine",),
    ("accord", "checks", "optimizer"),
    ("build",),
    ("",),  # the public names
    ("integrations",),  # these three over the public names and the errors only
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
OUTSIDE = ("integrations", "cli", "__main__")

# What the parts of the engine know of each other.
ENGINE = {
    "access": {"gather", "holding", "reduce", "scale", "torn", "unit"},
    "activations": {"staging", "versions"},
    "aliases": set(),
    "alike": set(),
    "anchor": {"precision", "unit"},
    "assemble": {"discover", "source", "unit"},
    "buffers": set(),
    "choosing": set(),
    "containers": set(),
    "discover": set(),
    "engine": {
        "access",
        "gather",
        "hooks",
        "loading",
        "membership",
        "reduce",
        "residency",
        "saving",
        "scale",
        "skips",
        "step",
        "torn",
        "unit",
        "update",
    },
    "forked": {"engine"},
    "gather": {"holding", "recorded", "unit"},
    "holding": set(),
    "hooks": {
        "activations",
        "anchor",
        "gather",
        "holding",
        "membership",
        "outputs",
        "precision",
        "reads",
        "reduce",
        "saved",
        "scale",
        "transforms",
        "under_way",
        "unit",
        "uses",
        "weakly",
    },
    "idioms": {"unit"},
    "initialisation": set(),
    "leftovers": {"anchor"},
    "loading": {"access", "choosing", "gather", "placing", "reduce", "scale", "taking", "torn", "unit", "update"},
    "membership": {"unit"},
    "mixing": set(),
    "norms": {"unit"},
    "originals": set(),
    "outputs": {"unit"},
    "placing": {"taking", "unit"},
    "precision": {"containers", "mixing"},
    "reads": set(),
    "recorded": set(),
    "reduce": {"buffers", "norms", "unit"},
    "refusals": {"engine", "under_way", "unit"},
    "residency": {"assemble", "gather", "holding", "reduce", "staging", "unit"},
    "samples": set(),
    "saved": {"activations", "unit", "versions"},
    "saving": {"access", "scale", "unit"},
    "scale": set(),
    "sharing": {"update"},
    "skips": {"scale"},
    "slices": {"leftovers", "samples", "versions"},
    "source": {"discover", "initialisation", "originals"},
    "staging": set(),
    "step": {"norms", "scale", "sharing", "unit", "update"},
    "taking": {"scale", "unit", "update"},
    "torn": {"unit"},
    "tracing": {"engine"},
    "transforms": {"unit"},
    "under_way": set(),
    "unit": {"discover", "holding", "reads", "recorded", "versions"},
    "update": {"unit"},
    "uses": {"unit"},
    "versions": set(),
    "weakly": set(),
}


def part_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    own = part_of(module)
    for target in imports(module):
        part = part_of(target)
        if part == own:
            continue
        if own == "" or LEVEL[own] == 0:  # the public names come from everywhere below; values may know values
            assert LEVEL[part] <= LEVEL[own], f"penstock.{module} imports penstock.{target}"
        else:
            assert LEVEL[part] < LEVEL[own], f"penstock.{module} imports penstock.{target}"


@pytest.mark.parametrize("module", [m for m in modules() if part_of(m) in OUTSIDE])
def test_the_command_line_and_integrations_use_public_names_only(module: str) -> None:
    public = {"", "errors", "losses", "checkpoint", *OUTSIDE}  # files are as public as names, and know no engine
    assert {part_of(target) for target in imports(module)} <= public


def test_parts_of_the_engine_import_each_other_only_as_listed() -> None:
    found = {}
    for module in modules():
        if module.startswith("engine."):
            siblings = {target for target in imports(module) if target.startswith("engine.")}
            found[module.removeprefix("engine.")] = {target.removeprefix("engine.") for target in siblings}
    assert found == ENGINE


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: {t for t in imports(module) if t not in (module, "")} for module in modules() if module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", modules())
def test_no_star_imports(module: str) -> None:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"line {node.lineno}"


def test_native_code_has_few_callers() -> None:
    """Arithmetic is called by the rules, files by `machine.aio`; others hand a pool of threads on."""
    for module, tree in modules().items():
        if part_of(module) == "rules" or module == "machine.aio":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "penstock":
                assert "_native" not in [alias.name for alias in node.names], f"penstock.{module}, line {node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module == "penstock._native":
                assert [alias.name for alias in node.names] == ["Pool"], f"penstock.{module}, line {node.lineno}"


MAKERS = ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray", "SimpleQueue", "Queue")
MUTATORS = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard")


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return (
        isinstance(value, ast.Call)
        and (value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")) in MAKERS
    )


@pytest.mark.parametrize("module", modules())
def test_no_module_keeps_state(module: str) -> None:
    """A module-level container is a constant: named in capitals, and nothing in the module changes it."""
    tree = modules()[module]
    constants = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                assert isinstance(target, ast.Name)
                assert target.id == "__all__" or target.id.isupper(), f"{target.id} on line {node.lineno}"
                constants.add(target.id)
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', '?')}"
        assert not isinstance(node, ast.Global), where
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert not (isinstance(node.value, ast.Name) and node.value.id in constants), where
        if isinstance(node, ast.AugAssign):
            assert not (isinstance(node.target, ast.Name) and node.target.id in constants), where
        if isinstance(node, ast.Call):
            function = node.func
            assert not (isinstance(function, ast.Name) and function.id == "globals" and module), where
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                assert not (function.value.id in constants and function.attr in MUTATORS), where
            caches = isinstance(function, ast.Name) and function.id in ("cache", "lru_cache")
            assert not caches, where
        if isinstance(node, ast.FunctionDef):
            names = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
            assert not {"cache", "lru_cache"} & set(names), f"{where}: a cache is state"
