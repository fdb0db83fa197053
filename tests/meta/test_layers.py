"""Arrows between modules point down only, as the design page draws them."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.meta.source import imports, modules

LAYERS = (
    (
        "config",
        "errors",
        "files",
        "layout",
        "optim",
        "trace",
        "_native",
    ),  # values and arithmetic
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


# What stands outside of the engine takes its internal names from one module, which lists them: packages, what they may
# import besides (files are as public as names), that module.
OPEN = {"config", "errors", "files", "layout", "trace"}
LISTS = {
    "planner.simulation.engine_internals": (("planner", "plans", "figures"), {*OPEN, "probe", "ext.observe.timeline"}),
    "integrations.engine_internals": (
        OUTSIDE,
        {
            "",
            "errors",
            "ext.interop.dcp",
            "ext.interop.deepspeed",
            "ext.observe.timeline",
            "files",
            "footprint",
            "planner.formatting",
            "losses",
            "optim",
            "parallel",
            "planner",
            "ring",
            "doctor",
        },
    ),
}


@pytest.mark.parametrize("internals", LISTS)
def test_internal_names_are_taken_from_the_list_of_them(internals: str) -> None:
    packages, free = LISTS[internals]
    for module in modules():
        if part_of(module) in packages and module != internals:
            for target in imports(module):
                of_free = target in free or part_of(target) in {*free, *packages}
                assert of_free, f"penstock.{module} imports penstock.{target}: list the name in {internals}"


@pytest.mark.parametrize("internals", LISTS)
def test_a_list_of_internal_names_has_no_name_that_nobody_takes(internals: str) -> None:
    listed, taken = set(), set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
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
            for target in imports(module):
                if target.startswith("engine."):
                    assert folder_of(target) in {own, *FOLDERS[own]}, f"penstock.{module} imports penstock.{target}"


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
    """Arithmetic is called by the rules, files by `runtime.aio`; others hand a pool of threads on."""
    for module, tree in modules().items():
        if part_of(module) == "rules" or module == "runtime.aio":
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


STEP = """
import sys, tempfile, torch, penstock
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
placement = penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path=tempfile.mkdtemp())
optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, max_grad_norm=1.0)
def step():
    optimizer.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
def loaded():
    print(*sorted(name for name in sys.modules if name.startswith("penstock.ext")))
step()
optimizer.save(tempfile.mkdtemp() + "/saved")
loaded()
with optimizer.trace(tempfile.mkdtemp() + "/trace.json"):
    step()
loaded()
optimizer.close()
"""


def test_a_run_loads_nothing_of_ext_that_it_does_not_ask_for() -> None:
    ran = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    without, traced = ran.stdout.splitlines()
    assert without == ""
    assert "penstock.ext.observe.trace" in traced.split()
    assert "penstock.ext.observe.record" not in traced.split(), "each output by itself"
