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

#: Private names of torch, by why they are used. All were read in torch 2.11 and 2.13.
TORCH: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "tells the compiler which sizes divide": ("_check",),
        "one launch for many copies": ("_foreach_copy_",),
        "one launch for many norms; the call of torch's clipping, which gets the norms of handles": ("_foreach_norm",),
    },
    "torch.ops.aten": {
        "torch's clipping calls it on handles": ("_foreach_div_", "_foreach_mul_", "_foreach_norm"),
        "zero_grad(set_to_none=False) calls it on handles": ("_foreach_zero_",),
        "the simulation meets it in attention": (
            "_fused_sdp_choice",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        "the simulation meets it in experts": ("_grouped_mm",),
        "the simulation meets it in indexed writes": ("_index_put_impl_",),
        "the simulation meets it in item()": ("_local_scalar_dense",),
        "the simulation meets it in casts": ("_to_copy",),
        "the simulation meets it in indexing": ("_unsafe_index",),
        "the simulation meets it in products of matrices": ("_unsafe_view",),
    },
    "torch.Tensor": {
        "a hook is put before those that a tensor has": ("_backward_hooks",),
        "a view is told from its base": ("_base",),
        "makes the handles in .grad, which have no memory": ("_make_wrapper_subclass",),
        "bytes of a sparse tensor": ("_nnz",),
        "a user's hooks on parameters are seen": ("_post_accumulate_grad_hooks",),
        "what changed after it was saved is refused, with autograd's own count": ("_version",),
    },
    "torch.UntypedStorage": {
        "the identity of memory: data_ptr() is 0 where it was given back": ("_cdata",),
    },
    "torch.nn.Module": {
        "to(), half() and cuda() of a prepared model are refused, or move what is not ours": ("_apply",),
        "buffers are exchanged by name": ("_buffers",),
        "ours runs behind a user's; copies lose ours": ("_forward_hooks",),
        "ours runs before a user's; copies lose ours": ("_forward_pre_hooks",),
        "whether a module has parts, without the cost of children()": ("_modules",),
        "which buffers a checkpoint has": ("_non_persistent_buffers_set",),
        "parameters are exchanged by name, and read without the cost of parameters()": ("_parameters",),
        "DataParallel of a prepared model is refused": ("_replicate_for_data_parallel",),
        "the initialisation of MultiheadAttention and Transformer": ("_reset_parameters",),
        "one module's entries of a state_dict": ("_save_to_state_dict",),
        "DistributedDataParallel of a prepared model is refused": ("_ddp_params_and_buffers_to_ignore",),
    },
    "torch.nn.RNNBase": {
        "exchanges of parameters refuse those that it refers to": ("_flat_weight_refs",),
        "they are referred to again": ("_flat_weights",),
    },
    "torch.nn.modules.conv": {
        "convolutions of every dimension": ("_ConvNd",),
    },
    "torch.nn.utils.stateless": {
        "its frame tells that parameters are others for this call": ("_functional_call",),
    },
    "torch.optim.Optimizer": {
        "schedulers look there for a step before theirs": ("_opt_called",),
        "hooks that a user registers on our handle are the optimizer's": (
            "_optimizer_step_post_hooks",
            "_optimizer_step_pre_hooks",
        ),
        "schedulers that look for it do not wrap our refusal": ("_wrapped_by_lr_sched",),
    },
    "torch.autograd.Variable": {
        "a callback when a backward ends": ("_execution_engine",),
    },
    "torch._C": {
        "function modes are off on our side": ("DisableTorchFunction",),
        "released parameters are asked as plain tensors": ("DisableTorchFunctionSubclass",),
        "what notes that a tensor is a view": ("DispatchKey", "DispatchKeySet"),
        "autocast is off on our side": ("_DisableAutocast", "_is_any_autocast_enabled"),
        "levels of torch.func are off on our side": ("_DisableFuncTorch",),
        "fake tensors are made below every mode": ("_DisableTorchDispatch",),
        "fake tensors are no views of their addresses": ("_ExcludeDispatchKeyGuard",),
        "inference mode is off on our side, without the cost of the public class": ("_InferenceMode",),
        "whether torch propagates shapes just now": ("_TorchDispatchModeKey", "_get_dispatch_mode"),
        "which node runs: AccumulateGrad, or a reentrant checkpoint": ("_current_autograd_node",),
        "whether this thread is inside a backward": ("_current_graph_task_id",),
        "handles take no detour over __torch_function__": ("_disabled_torch_function_impl",),
        "whether an operator is made of others": ("_dispatch_has_kernel_for_dispatch_key",),
        "a user's dispatch modes are off on our side": (
            "_get_dispatch_stack_at",
            "_len_torch_dispatch_stack",
            "_pop_torch_dispatch_stack",
            "_push_on_torch_dispatch_stack",
        ),
        "gradients are off on our side, without the cost of the public class": ("_set_grad_enabled",),
        "whether autograd or a user keeps views of a buffer": ("_storage_Use_Count",),
    },
    "torch._C._autograd": {
        "threads of gloo would take the interpreter's lock for each hook": (
            "_pop_saved_tensors_default_hooks",
            "_push_saved_tensors_default_hooks",
        ),
        "torch.func allows no hooks of saved tensors": ("_saved_tensors_hooks_is_enabled",),
        "whether hooks of saved tensors are set, and whose": ("_top_saved_tensors_default_hooks",),
    },
    "torch._C._distributed_c10d": {
        "what a collective of the simulation returns": ("FakeWork",),
    },
    "torch._C._functorch": {
        "transforms that differentiate are refused": ("TransformType", "get_interpreter_stack"),
        "the graph of a wrapped gradient cannot be followed": ("is_functorch_wrapped_tensor",),
        "levels of torch.func are off on our side": ("peek_interpreter_stack",),
    },
    "torch._dynamo": {
        "floats of the code are constants": ("config.patch",),
        "the limit, for the text of an error": ("config.recompile_limit",),
        "hooks are traced into their callers, and never compiled alone": ("eval_frame.skip_code",),
    },
    "torch._inductor": {
        "whether it has the options that keep the host's rounding": ("config",),
        "its import registers the fused multiply-add": ("inductor_prims",),
    },
    "torch._subclasses.fake_tensor": {
        "shapes that depend on values": ("DataDependentOutputException", "DynamicOutputShapeException"),
        "torch tells the shapes of what an operator makes": ("FakeTensorMode",),
    },
    "torch._ops.OpOverload": {
        "operators are looked up without their overload": ("_overloadpacket",),
        "which arguments an operator writes": ("_schema",),
    },
    "torch._dynamo.eval_frame.OptimizedModule": {
        "the module that torch.compile has wrapped": ("_orig_mod",),
    },
    "torch.fx.experimental": {
        "equal sizes are no reason to compile again": ("_config",),
    },
    "torch.distributed.distributed_c10d": {
        "ranks meet there before they have a group of ours": ("_get_default_store",),
        "a group of some ranks, that others need not take part in": ("_new_process_group_helper",),
        "the group of a functional collective": ("_resolve_process_group",),
        "groups are listed there": ("_world",),
    },
    "torch.distributed.ProcessGroupGloo": {
        "connections are made when they are first used": ("_Options",),
        "of those options": ("_devices", "_threads", "_timeout"),
    },
    "torch.distributed.tensor.DTensor": {
        "its memory is exchanged in place": ("_local_tensor",),
        "its mesh, placements and whole shape": ("_spec",),
    },
    "torch.distributed.tensor._dtensor_spec": {
        "a parameter of other local elements": ("DTensorSpec", "TensorMeta"),
    },
    "torch.testing._internal.distributed.fake_pg": {
        "process groups of ranks that are not there": ("FakeStore",),
    },
    "torch.utils._python_dispatch": {
        "the documented way to see every operator": ("TorchDispatchMode",),
        "torch's own modes stay below ours": ("TorchDispatchMode._mode_key",),
        "what the simulation does for itself is not seen by it": ("_disable_current_modes",),
        "a value that wraps others is no plain tensor": ("is_traceable_wrapper_subclass",),
    },
    "torch.utils._pytree": {
        "names of what is nested in a batch": ("MappingKey", "tree_flatten_with_path"),
        "nested arguments": ("tree_iter", "tree_leaves", "tree_map"),
    },
}
ROWS = frozenset(f"{owner}.{name}" for owner, uses in TORCH.items() for names in uses.values() for name in names)
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
    assert missing == {}, "take a public name, or add one to TORCH: why, read in the oldest and the newest torch"


def test_every_row_of_private_names_is_used() -> None:
    assert ROWS - {row for name in used() for row in rows_of(name)} == set(), "take these rows out of TORCH"
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
