"""What the library consists of stays small: functions, constructors, packages, words, private names of torch.

Code is counted without blanks, comments and docstrings. The budget of a package is what there is, exactly. A change
that makes the house smaller lowers it, so that nothing grows back unseen; one that needs more raises it, and its commit
says why.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from penstock.integrations._private import accelerate, lightning, transformers, trl
from tests.meta.source import PACKAGE, modules

MOST_OF_A_FUNCTION, MOST_ARGUMENTS = 60, 8

# What is larger, and why.
FUNCTIONS: dict[str, str] = {}
CONSTRUCTORS = {
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
    "engine": (6833, 29),
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

BOTH = "2.11, 2.13"
#: Private names of torch: why each is used, and the versions of torch that it was read in.
TORCH: dict[str, dict[str, tuple[str, str]]] = {
    "torch": {
        "_check": ("tells the compiler which sizes divide", BOTH),
        "_foreach_copy_": ("one launch for many copies", BOTH),
        "_foreach_norm": (
            "one launch for many norms; the call of torch's clipping, which gets the norms of handles",
            BOTH,
        ),
    },
    "torch.ops.aten": {
        "_foreach_div_": ("torch's clipping calls it on handles", BOTH),
        "_foreach_mul_": ("torch's clipping calls it on handles", BOTH),
        "_foreach_norm": ("torch's clipping calls it on handles", BOTH),
        "_foreach_zero_": ("zero_grad(set_to_none=False) calls it on handles", BOTH),
        "_fused_sdp_choice": ("the simulation meets it in attention", BOTH),
        "_grouped_mm": ("the simulation meets it in experts", BOTH),
        "_index_put_impl_": ("the simulation meets it in indexed writes", BOTH),
        "_local_scalar_dense": ("the simulation meets it in item()", BOTH),
        "_scaled_dot_product_flash_attention_for_cpu": ("the simulation meets it in attention", BOTH),
        "_scaled_dot_product_flash_attention_for_cpu_backward": ("the simulation meets it in attention", BOTH),
        "_to_copy": ("the simulation meets it in casts", BOTH),
        "_unsafe_index": ("the simulation meets it in indexing", BOTH),
        "_unsafe_view": ("the simulation meets it in products of matrices", BOTH),
    },
    "torch.Tensor": {
        "_backward_hooks": ("a hook is put before those that a tensor has", BOTH),
        "_base": ("a view is told from its base", BOTH),
        "_make_wrapper_subclass": ("makes the handles in .grad, which have no memory", BOTH),
        "_nnz": ("bytes of a sparse tensor", BOTH),
        "_post_accumulate_grad_hooks": ("a user's hooks on parameters are seen", BOTH),
        "_version": ("what changed after it was saved is refused, with autograd's own count", BOTH),
    },
    "torch.UntypedStorage": {"_cdata": ("the identity of memory: data_ptr() is 0 where it was given back", BOTH)},
    "torch.nn.Module": {
        "_apply": ("to(), half() and cuda() of a prepared model are refused, or move what is not ours", BOTH),
        "_buffers": ("buffers are exchanged by name", BOTH),
        "_forward_hooks": ("ours runs behind a user's; copies lose ours", BOTH),
        "_forward_pre_hooks": ("ours runs before a user's; copies lose ours", BOTH),
        "_modules": ("whether a module has parts, without the cost of children()", BOTH),
        "_non_persistent_buffers_set": ("which buffers a checkpoint has", BOTH),
        "_parameters": ("parameters are exchanged by name, and read without the cost of parameters()", BOTH),
        "_replicate_for_data_parallel": ("DataParallel of a prepared model is refused", BOTH),
        "_reset_parameters": ("the initialisation of MultiheadAttention and Transformer", BOTH),
        "_save_to_state_dict": ("one module's entries of a state_dict", BOTH),
        "_ddp_params_and_buffers_to_ignore": ("DistributedDataParallel of a prepared model is refused", BOTH),
    },
    "torch.nn.RNNBase": {
        "_flat_weight_refs": ("exchanges of parameters refuse those that it refers to", BOTH),
        "_flat_weights": ("they are referred to again", BOTH),
    },
    "torch.nn.modules.conv": {"_ConvNd": ("convolutions of every dimension", BOTH)},
    "torch.nn.utils.stateless": {
        "_functional_call": ("its frame tells that parameters are others for this call", BOTH)
    },
    "torch.optim.Optimizer": {
        "_opt_called": ("schedulers look there for a step before theirs", BOTH),
        "_optimizer_step_post_hooks": ("hooks that a user registers on our handle are the optimizer's", BOTH),
        "_optimizer_step_pre_hooks": ("hooks that a user registers on our handle are the optimizer's", BOTH),
        "_wrapped_by_lr_sched": ("schedulers that look for it do not wrap our refusal", BOTH),
    },
    "torch.autograd.Variable": {"_execution_engine": ("a callback when a backward ends", BOTH)},
    "torch._C": {
        "DisableTorchFunction": ("function modes are off on our side", BOTH),
        "DisableTorchFunctionSubclass": ("released parameters are asked as plain tensors", BOTH),
        "DispatchKey": ("what notes that a tensor is a view", BOTH),
        "DispatchKeySet": ("what notes that a tensor is a view", BOTH),
        "_DisableAutocast": ("autocast is off on our side", BOTH),
        "_DisableFuncTorch": ("levels of torch.func are off on our side", BOTH),
        "_DisableTorchDispatch": ("fake tensors are made below every mode", BOTH),
        "_ExcludeDispatchKeyGuard": ("fake tensors are no views of their addresses", BOTH),
        "_InferenceMode": ("inference mode is off on our side, without the cost of the public class", BOTH),
        "_TorchDispatchModeKey": ("whether torch propagates shapes just now", BOTH),
        "_current_autograd_node": ("which node runs: AccumulateGrad, or a reentrant checkpoint", BOTH),
        "_current_graph_task_id": ("whether this thread is inside a backward", BOTH),
        "_disabled_torch_function_impl": ("handles take no detour over __torch_function__", BOTH),
        "_dispatch_has_kernel_for_dispatch_key": ("whether an operator is made of others", BOTH),
        "_get_dispatch_mode": ("whether torch propagates shapes just now", BOTH),
        "_get_dispatch_stack_at": ("a user's dispatch modes are off on our side", BOTH),
        "_is_any_autocast_enabled": ("autocast is off on our side", BOTH),
        "_len_torch_dispatch_stack": ("a user's dispatch modes are off on our side", BOTH),
        "_pop_torch_dispatch_stack": ("a user's dispatch modes are off on our side", BOTH),
        "_push_on_torch_dispatch_stack": ("a user's dispatch modes are off on our side", BOTH),
        "_set_grad_enabled": ("gradients are off on our side, without the cost of the public class", BOTH),
        "_storage_Use_Count": ("whether autograd or a user keeps views of a buffer", BOTH),
    },
    "torch._C._autograd": {
        "_pop_saved_tensors_default_hooks": ("threads of gloo would take the interpreter's lock for each hook", BOTH),
        "_push_saved_tensors_default_hooks": ("threads of gloo would take the interpreter's lock for each hook", BOTH),
        "_saved_tensors_hooks_is_enabled": ("torch.func allows no hooks of saved tensors", BOTH),
        "_top_saved_tensors_default_hooks": ("whether hooks of saved tensors are set, and whose", BOTH),
    },
    "torch._C._distributed_c10d": {"FakeWork": ("what a collective of the simulation returns", BOTH)},
    "torch._C._functorch": {
        "TransformType": ("transforms that differentiate are refused", BOTH),
        "get_interpreter_stack": ("transforms that differentiate are refused", BOTH),
        "is_functorch_wrapped_tensor": ("the graph of a wrapped gradient cannot be followed", BOTH),
        "peek_interpreter_stack": ("levels of torch.func are off on our side", BOTH),
    },
    "torch._dynamo": {
        "config.patch": ("floats of the code are constants", BOTH),
        "config.recompile_limit": ("the limit, for the text of an error", BOTH),
        "eval_frame.skip_code": ("hooks are traced into their callers, and never compiled alone", BOTH),
    },
    "torch._inductor": {
        "config": ("whether it has the options that keep the host's rounding", BOTH),
        "inductor_prims": ("its import registers the fused multiply-add", BOTH),
    },
    "torch._subclasses.fake_tensor": {
        "DataDependentOutputException": ("shapes that depend on values", BOTH),
        "DynamicOutputShapeException": ("shapes that depend on values", BOTH),
        "FakeTensorMode": ("torch tells the shapes of what an operator makes", BOTH),
    },
    "torch._ops.OpOverload": {
        "_overloadpacket": ("operators are looked up without their overload", BOTH),
        "_schema": ("which arguments an operator writes", BOTH),
    },
    "torch._dynamo.eval_frame.OptimizedModule": {"_orig_mod": ("the module that torch.compile has wrapped", BOTH)},
    "torch.fx.experimental": {"_config": ("equal sizes are no reason to compile again", BOTH)},
    "torch.distributed.distributed_c10d": {
        "_get_default_store": ("ranks meet there before they have a group of ours", BOTH),
        "_new_process_group_helper": ("a group of some ranks, that others need not take part in", BOTH),
        "_resolve_process_group": ("the group of a functional collective", BOTH),
        "_world": ("groups are listed there", BOTH),
    },
    "torch.distributed.ProcessGroupGloo": {
        "_Options": ("connections are made when they are first used", BOTH),
        "_devices": ("of those options", BOTH),
        "_threads": ("of those options", BOTH),
        "_timeout": ("of those options", BOTH),
    },
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": ("its memory is exchanged in place", BOTH),
        "_spec": ("its mesh, placements and whole shape", BOTH),
    },
    "torch.distributed.tensor._dtensor_spec": {
        "DTensorSpec": ("a parameter of other local elements", BOTH),
        "TensorMeta": ("a parameter of other local elements", BOTH),
    },
    "torch.testing._internal.distributed.fake_pg": {"FakeStore": ("process groups of ranks that are not there", BOTH)},
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": ("the documented way to see every operator", BOTH),
        "TorchDispatchMode._mode_key": ("torch's own modes stay below ours", BOTH),
        "_disable_current_modes": ("what the simulation does for itself is not seen by it", BOTH),
        "is_traceable_wrapper_subclass": ("a value that wraps others is no plain tensor", BOTH),
    },
    "torch.utils._pytree": {
        "MappingKey": ("names of what is nested in a batch", BOTH),
        "tree_flatten_with_path": ("names of what is nested in a batch", BOTH),
        "tree_iter": ("nested arguments", BOTH),
        "tree_leaves": ("nested arguments", BOTH),
        "tree_map": ("nested arguments", BOTH),
    },
}
ROWS = frozenset(f"{owner}.{name}" for owner, names in TORCH.items() for name in names)
IN_TABLE = frozenset(row.rpartition(".")[2] for row in ROWS)
#: Private names of Python, and of the libraries that penstock.integrations lists.
OF_PYTHON = frozenset(f"?.{name}" for name in ("_DummyThread", "_asdict", "_exit", "_getframe", "_value_"))
LISTED = (accelerate.NAMES, lightning.NAMES, transformers.NAMES, trl.NAMES)
OF_OTHERS = OF_PYTHON | {f"?.{row.rpartition('.')[2]}" for names in LISTED for row in names}
#: Names of ours that objects of torch have as well.
OURS = {"_name", "_native"}


def text_of(module: str) -> str:
    path = PACKAGE.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@cache
def nodes_of(module: str) -> Sequence[ast.AST]:
    return tuple(ast.walk(modules()[module]))


@cache
def lines_of_code(module: str) -> frozenset[int]:
    """The numbers of the lines that are no blanks, comments and docstrings."""
    lines = dict(enumerate(map(str.strip, text_of(module).splitlines()), 1))
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


def too_large(module: str) -> Iterator[tuple[str, str, int]]:
    """What is above a limit: of which kind, its name, its size."""
    code = lines_of_code(module)
    for node in nodes_of(module):
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


def packages() -> dict[str, tuple[int, int]]:
    """Code lines and modules by package."""
    found: dict[str, tuple[int, int]] = {}
    for module in modules():
        is_package = PACKAGE.joinpath(*module.split(".")).is_dir()
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
    assert missing == {}, "take a public name, or add a row to TORCH: why, and the versions that it was read in"


def test_every_row_of_private_names_is_used() -> None:
    assert ROWS - {row for name in used() for row in rows_of(name)} == set(), "take these rows out of TORCH"
    assert OF_PYTHON - used().keys() == set(), "take these names out of OF_PYTHON"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._anything()", {"torch._C._anything"}),
        ("from torch import nn\nnn.modules.module._anything", {"torch.nn.modules.module._anything"}),
        ("from torch._anything import public", {"torch._anything.public"}),
        ("import torch._anything.inside", {"torch._anything.inside"}),
        ("import torch\nalias = torch.autograd.graph\nalias._anything", {"torch.autograd.graph._anything"}),
        ("tensor._anything_of_torch", {"?._anything_of_torch"}),
        ("optimizer.param_groups[0]._anything_of_torch", {"?._anything_of_torch"}),
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
