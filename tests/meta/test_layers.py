"""Arrows between modules point down only, as the design page draws them."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.meta.source import imports, modules, nodes_of, place

LAYERS = (
    ("config", "errors", "files", "layout", "optim", "trace", "_native"),  # values and arithmetic
    ("runtime", "rules"),
    ("tiers",),
    ("figures",),  # names, units and words of what a machine does in a second
    ("probe",),
    ("doctor",),
    ("checkpoint",),
    ("engine",),
    ("ext",),  # loaded by the option that asks for it
    ("plans",),  # a plan as a value and a file: what a run needs of the planner
    ("checks", "losses", "optimizer", "parallel", "recompute", "ring"),
    ("blueprint", "ext.ema", "inference", "planned"),
    ("memory_budget",),
    ("construct",),
    ("build", "footprint"),
    ("planner",),
    ("preparing",),
    ("",),  # the public names
    ("integrations",),  # these three over the public names and the errors only
    ("cli",),
    ("train",),  # takes the page of a run from there
    ("__main__",),
)
#: Modules of the planner that are values; all others are above the engine, and the probe is below it.
PLANS = {"planner.plans"}
FIGURES = {"planner.rates", "planner.formatting"}
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
OUTSIDE = ("integrations", "cli", "train", "__main__")

# What the folders of the engine know of each other; what stands beside them knows all of them.
FOLDERS = {
    "unit": set(),
    "step": {"unit"},
    "gradients": {"unit", "step"},
    "forward_backward": {"unit", "step", "gradients"},
    "state": {"unit", "step", "gradients", "forward_backward"},
}


def part_of(module: str) -> str:
    """The part of the package that a module is in, or the module itself where it has a layer of its own."""
    if module in PLANS:
        return "plans"
    if module in FIGURES:
        return "figures"
    return module if module in LEVEL else module.split(".")[0]


def points_down(module: str, target: str) -> bool:
    own, part = part_of(module), part_of(target)
    # The public names come from everywhere below; values may know values.
    beside = own == "" or LEVEL[own] == 0
    return part == own or LEVEL[part] < LEVEL[own] + beside


def test_imports_point_down() -> None:
    wrong = [f"{place(m)} imports penstock.{t}" for m in modules() for t in imports(m) if not points_down(m, t)]
    assert not wrong, "\n".join(wrong)


# What stands outside of the engine takes its internal names from one module, which lists them: packages, what they may
# import besides (files are as public as names), that module.
OPEN = {"config", "errors", "files", "layout", "trace"}
LISTS = {
    "planner.simulation.engine_internals": (("planner", "plans", "figures"), {*OPEN, "probe", "ext.observe.timeline"}),
    "integrations.engine_internals": (
        OUTSIDE,
        {
            *("", "errors", "ext.interop.dcp", "ext.interop.deepspeed", "ext.observe.timeline", "files", "footprint"),
            *("planner.formatting", "losses", "optim", "parallel", "planner", "ring", "doctor"),
        },
    ),
}


@pytest.mark.parametrize("internals", LISTS)
def test_internal_names_are_taken_from_the_list_of_them(internals: str) -> None:
    packages, free = LISTS[internals]
    for module in modules():
        if part_of(module) in packages and module != internals:
            taken = {target for target in imports(module) if not {target, part_of(target)} & {*free, *packages}}
            assert taken == set(), f"{place(module)}: list the names in {internals}"


@pytest.mark.parametrize("internals", LISTS)
def test_a_list_of_internal_names_has_no_name_that_nobody_takes(internals: str) -> None:
    listed, taken = set(), set()
    for module in modules():
        for node in nodes_of(module):
            if isinstance(node, ast.ImportFrom) and module == internals:
                listed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == f"penstock.{internals}":
                taken |= {alias.name for alias in node.names}
    assert listed == taken


def test_every_layer_is_there() -> None:
    assert {part_of(module) for module in modules()} | {"_native"} == LEVEL.keys()


def folder_of(module: str) -> str | None:
    """The folder of the engine that a module is in, if it is in one."""
    parts = module.split(".")
    return parts[1] if parts[0] == "engine" and len(parts) > 2 else None


def test_folders_of_the_engine_know_each_other_only_one_way() -> None:
    assert {folder for module in modules() if (folder := folder_of(module))} == FOLDERS.keys()
    for module in modules():
        own = folder_of(module)
        if own is not None:
            others = {target for target in imports(module) if target.startswith("engine.")}
            assert {target for target in others if folder_of(target) not in {own, *FOLDERS[own]}} == set(), place(
                module
            )


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: {t for t in imports(module) if t not in (module, "")} for module in modules() if module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_native_code_has_few_callers() -> None:
    """Arithmetic is called by the rules, files by `runtime.aio`; others hand a pool of threads on."""
    for module in modules():
        if part_of(module) == "rules" or module == "runtime.aio":
            continue
        for node in nodes_of(module):
            if isinstance(node, ast.ImportFrom) and node.module == "penstock":
                assert "_native" not in [alias.name for alias in node.names], place(module, node)
            if isinstance(node, ast.ImportFrom) and node.module == "penstock._native":
                assert [alias.name for alias in node.names] == ["Pool"], place(module, node)


MAKERS = ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray", "SimpleQueue", "Queue")
MUTATORS = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard")


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return (
        isinstance(value, ast.Call)
        and (value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")) in MAKERS
    )


def states(module: str) -> Iterator[ast.AST]:
    """What of a module keeps state: a module-level container is a constant, in capitals, and nothing changes it."""
    constants = set()
    for node in modules()[module].body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            names = [ast.unparse(each) for each in (node.targets if isinstance(node, ast.Assign) else [node.target])]
            if not all(name == "__all__" or name.isupper() for name in names):
                yield node
            constants |= set(names)

    def is_constant(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in constants

    for node in nodes_of(module):
        match node:
            case ast.Global():
                yield node
            case ast.Subscript(value=held, ctx=ast.Store() | ast.Del()) if is_constant(held):
                yield node
            case ast.AugAssign(target=held) if is_constant(held):
                yield node
            case ast.Call(func=ast.Attribute(value=held, attr=name)) if is_constant(held) and name in MUTATORS:
                yield node
            case ast.Call(func=ast.Name(id="cache" | "lru_cache")):
                yield node
            case ast.Call(func=ast.Name(id="globals")) if module:
                yield node
            case ast.FunctionDef(decorator_list=names) if {"cache", "lru_cache"} & set(map(ast.unparse, names)):
                yield node


def test_no_module_keeps_state() -> None:
    found = [f"{place(module, node)}: {ast.unparse(node)[:80]}" for module in modules() for node in states(module)]
    assert not found, "\n".join(found)
