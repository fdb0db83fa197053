"""The function that accelerators run, here on the cpu: the native update's bits, and one graph for the compiler."""

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import StateFormat, UpdateSlice
from penstock.rules.device import ROUNDING, DeviceUpdate, compile_pass, one_pass, update_reference
from penstock.rules.rule import fma, sqrt
from tests.support import sampled_rows
from tests.unit.rules.segments import (
    FORMATS,
    RULES,
    STORAGES,
    copy_of,
    make,
    parts,
    random_inputs,
    rule_and_hyper,
)

Check = Callable[[Tensor, Tensor], None]
GRAPH_RULES = ("adamw", "sgd-nesterov", "adagrad", "lion")
GRAPH_FORMATS = (FORMATS[0], FORMATS[3], FORMATS[4])
formats = pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")


@formats
@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, STORAGES[2]) for name in RULES), *(("adamw", storage) for storage in STORAGES)],
    ids=str,
)
def test_one_pass_gives_the_native_bits(
    name: str, storage: tuple[Any, Any], format_: StateFormat, assert_same_bits: Check
) -> None:
    for numel in (2000, 300):
        rule, step_scalars = rule_and_hyper(name, format_)
        native = make(rule, *random_inputs(numel), storage, torch.bfloat16)
        device = copy_of(native)
        rule.update(native, step_scalars, 0.7, None)
        DeviceUpdate(one_pass)(rule, [(device, step_scalars)], 0.7)
        for (_, a), (_, b) in zip(parts(device), parts(native), strict=True):
            assert_same_bits(a, b)


class RoundedOnce:
    """A back end of the compiler that runs a graph with each operation rounded once, as compiled kernels are to do."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.prims.fma:
                node.target = fma
            elif node.target == "sqrt":
                node.op, node.target = "call_function", sqrt
        graph.recompile()
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize(
    ("name", "format_"),
    sampled_rows(product(GRAPH_RULES, GRAPH_FORMATS), every=4),
    ids=lambda value: getattr(value, "dtype", value),
)
def test_one_graph_of_the_native_bits_serves_every_step(
    name: str, format_: StateFormat, assert_same_bits: Check
) -> None:
    torch._dynamo.reset()
    backend = RoundedOnce()
    compiled = DeviceUpdate(compile_pass(one_pass, backend))
    for step, numel in ((3, 2048), (4, 2048), (5, 2000), (6, 1111)):
        rule, step_scalars = rule_and_hyper(name, format_, step=step)
        native = make(rule, *random_inputs(numel), (torch.bfloat16, torch.int16), torch.bfloat16)
        traced = copy_of(native)
        rule.update(native, step_scalars, 0.1 * step, None)
        compiled(rule, [(traced, step_scalars)], 0.1 * step)
        for (_, a), (_, b) in zip(parts(traced), parts(native), strict=True):
            assert_same_bits(a, b)
    (graph,) = backend.graphs
    sizes = [n.meta["example_value"].shape[0] for n in graph.graph.nodes if n.name.startswith("l_tensors_0")]
    assert sizes
    assert all(str(size.node.expr).startswith("256*") for size in sizes), "the compiler knows that vectors fit"


def test_views_of_whatever_memory_compile_nothing_anew() -> None:
    """torch guards what a view is of: each form of it compiled a kernel of its own."""
    torch._dynamo.reset()
    backend = RoundedOnce()
    compiled = DeviceUpdate(compile_pass(one_pass, backend))
    rule, step_scalars = rule_and_hyper("lion")
    update_slice = make(rule, *random_inputs(2048), (torch.float32, None), torch.bfloat16)
    allocation = torch.zeros(10, 4096, dtype=torch.uint8)
    for param in (update_slice.param, torch.zeros(4096)[:2048], allocation[1:3].view(-1).view(torch.float32)):
        compiled(rule, [(replace(update_slice, param=param), step_scalars)], 1.0)
    assert len(backend.graphs) == 1


def in_one_memory(update_slice: UpdateSlice) -> UpdateSlice:
    """Copy a slice into one allocation, as tiers do: views of different dtypes, one behind the other."""
    tensors = [update_slice.param, update_slice.grad, update_slice.master, *update_slice.states, *update_slice.scales]
    there = [tensor for tensor in tensors if tensor is not None]
    memory = torch.cat([tensor.view(torch.uint8) for tensor in there]).split([tensor.nbytes for tensor in there])
    views = iter([part.view(tensor.dtype) for part, tensor in zip(memory, there, strict=True)])
    param, grad, master, *rest = (None if tensor is None else next(views) for tensor in tensors)
    states, scales = rest[: len(update_slice.states)], rest[len(update_slice.states) :]
    return replace(update_slice, param=param, grad=grad, master=master, states=tuple(states), scales=tuple(scales))


@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize("format_", [*FORMATS, StateFormat("int8")], ids=lambda f: f"{f.dtype}-{f.rounding}")
def test_the_compiler_refuses_no_format_in_one_memory(format_: StateFormat) -> None:
    """It took elements of different dtypes for overlapping ones, and floats of the 8-bit map for inputs."""
    torch._dynamo.reset()
    rule, step_scalars = rule_and_hyper("adamw", format_)
    update_slice = in_one_memory(make(rule, *random_inputs(2048), (torch.bfloat16, torch.int16), torch.bfloat16))
    DeviceUpdate(compile_pass(one_pass, "aot_eager"))(rule, [(update_slice, step_scalars)], 0.7)


@pytest.mark.parametrize("blocks", [2, 9, 12])
def test_sizes_that_are_equal_by_chance_compile_nothing_anew(blocks: int) -> None:
    """As many scales as scalars, or as rows of them: the first such update was compiled for that case alone."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = DeviceUpdate(compile_pass(one_pass, backend))
    rule, step_scalars = rule_and_hyper("adamw", StateFormat("int8"))
    for sizes in ((256 * blocks,), (256 * 40,), (256 * 3, 512)):
        inputs = [make(rule, *random_inputs(numel), (torch.bfloat16, torch.int16), torch.bfloat16) for numel in sizes]
        compiled(rule, [(update_slice, step_scalars) for update_slice in inputs], 0.7)
    assert len(graphs) == 1


def test_the_limit_of_compilations_is_named() -> None:
    rule, step_scalars = rule_and_hyper("adamw")
    update = DeviceUpdate(compile_pass(one_pass, "eager"))
    torch._dynamo.reset()
    first, second = (
        make(rule, *random_inputs(512), (dtype, None), torch.bfloat16) for dtype in (torch.bfloat16, torch.float32)
    )
    with torch._dynamo.config.patch(recompile_limit=1):
        update(rule, [(first, step_scalars)], 0.7)
        with pytest.warns(UserWarning, match="compiled 1 times, which is torch's limit"):
            update(rule, [(second, step_scalars)], 0.7)


def test_the_compiler_rounds_otherwise_for_our_functions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    seen: list[dict[str, Any]] = []
    before = config.get_config_copy()
    assert before.keys() >= ROUNDING.keys(), "this torch has what rules/device.py asks for"

    def compiler(graph: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        seen.append(config_patches)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiler)
    torch._dynamo.reset()
    rule, step_scalars = rule_and_hyper("lion")
    update_slice = make(rule, *random_inputs(2048), (torch.float32, None), torch.bfloat16)
    DeviceUpdate(compile_pass(one_pass))(rule, [(update_slice, step_scalars)], 0.7)
    torch.compile(lambda value: value + 1)(torch.ones(3))
    assert seen[0].items() >= ROUNDING.items()
    assert not (seen[1] or {}).keys() & ROUNDING.keys()
    assert config.get_config_copy() == before


def test_factors_of_indices_fit_32_bits() -> None:
    """Inductor computes with what follows from an index alone in int32: a larger factor is refused by Triton."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    rule, step_scalars = rule_and_hyper("adamw", StateFormat("bf16", rounding="stochastic"))
    update_slice = make(rule, *random_inputs(2048), (torch.bfloat16, None), torch.bfloat16)
    DeviceUpdate(compile_pass(one_pass, backend))(rule, [(update_slice, step_scalars)], 0.7)
    from_inputs: set[Any] = set()
    factors = []
    for node in graphs[0].graph.nodes:
        if node.op == "placeholder" or from_inputs.intersection(node.all_input_nodes):
            from_inputs.add(node)
        elif node.target is operator.mul:
            factors += [number for number in node.args if isinstance(number, int)]
    assert factors
    assert max(factors) < 2**31


def test_many_rules_in_one_process_are_all_compiled(recwarn: pytest.WarningsRecorder) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    cases = [(name, format_) for name in ("sgd", "lion") for format_ in FORMATS]
    for name, format_ in cases:
        rule, step_scalars = rule_and_hyper(name, format_)
        update_slice = make(rule, *random_inputs(512), (torch.bfloat16, torch.int16), torch.bfloat16)
        DeviceUpdate(compile_pass(one_pass, backend))(rule, [(update_slice, step_scalars)], 0.7)
    assert len(graphs) == len(cases) > torch._dynamo.config.recompile_limit
    assert not [w for w in recwarn if "torch.compile failed" in str(w.message)]


def test_a_compiler_that_fails_is_said_once_and_the_reference_runs(assert_same_bits: Check) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler")

    rule, step_scalars = rule_and_hyper("adamw")
    expected = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    actual = copy_of(expected)
    update = DeviceUpdate(broken)
    with pytest.warns(UserWarning, match=r"torch\.compile failed for the update on cpu \(RuntimeError: no compiler\)"):
        update(rule, [(actual, step_scalars)], 1.0)
    update(rule, [(actual, step_scalars)], 1.0)
    for _ in range(2):
        update_reference(rule, expected, step_scalars, 1.0)
    assert_same_bits(actual.param, expected.param)


def test_without_a_compiler_the_reference_runs(assert_same_bits: Check) -> None:
    rule, step_scalars = rule_and_hyper("lion")
    expected = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    actual = copy_of(expected)
    rule.on_device(rule, [(actual, step_scalars)], 1.0)
    update_reference(rule, expected, step_scalars, 1.0)
    assert_same_bits(actual.param, expected.param)
