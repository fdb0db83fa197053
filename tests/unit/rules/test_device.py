"""The function that accelerators run, here on the cpu: one graph for the compiler, and many segments at once."""

import operator
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import StateFormat, UpdateSlice, device
from penstock.rules.device import (
    ROUNDING,
    DeviceUpdate,
    compile_pass,
    one_pass,
    update_in_torch,
    update_reference,
)
from penstock.rules.fused import FusedRule, FusedScalars
from penstock.rules.rule import BLOCK_NUMEL, fma, sqrt
from tests.lib.covering import covering
from tests.unit.rules.segments import (
    FORMATS,
    RULES,
    STORAGES,
    assert_same,
    copy_of,
    make,
    random_inputs,
    rule_and_hyper,
)

FP32, REMAINDER, FULL = STORAGES[0], STORAGES[2], STORAGES[3]
SIZES = (300, 2048, 1, 777, 256)


class Graphs:
    """A back end of the compiler that runs graphs, each operation rounded once, as compiled kernels are to do."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.made: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.prims.fma:
                node.target = fma
            elif node.target == "sqrt":
                node.op, node.target = "call_function", sqrt
        graph.recompile()
        self.made.append(graph)
        return graph.forward

    def update(self) -> DeviceUpdate:
        return DeviceUpdate(compile_pass(one_pass, self))


def several(
    name: str, storage: tuple[Any, Any], format_: StateFormat = FORMATS[0], steps: tuple[int, ...] = (3,)
) -> tuple[FusedRule, list[tuple[UpdateSlice, FusedScalars]]]:
    """Segments of some sizes, each of the next step in turn, numbered one after the other."""
    update_slices = []
    for index, numel in enumerate(SIZES):
        rule, step_scalars = rule_and_hyper(name, format_, steps[index % len(steps)])
        update_slice = make(rule, *random_inputs(numel), storage, torch.bfloat16)
        update_slices.append((replace(update_slice, first=16 * index * BLOCK_NUMEL), step_scalars))
    return rule, update_slices


# What the compiler is given


def test_one_graph_of_the_native_bits_serves_every_step() -> None:
    """Inductor computes with what follows from an index alone in int32: a larger factor is refused by Triton."""
    graphs = Graphs()
    compiled = graphs.update()
    for step, numel in ((3, 2048), (4, 2048), (5, 2000), (6, 1111)):
        rule, step_scalars = rule_and_hyper("lion", FORMATS[3], step=step)
        native = make(rule, *random_inputs(numel), STORAGES[1], torch.bfloat16)
        traced = copy_of(native)
        rule.update(native, step_scalars, 0.1 * step, None)
        compiled(rule, [(traced, step_scalars)], 0.1 * step)
        assert_same(traced, native, numel)
    (graph,) = graphs.made
    sizes = [n.meta["example_value"].shape[0] for n in graph.graph.nodes if n.name.startswith("l_tensors_0")]
    assert sizes
    assert all(str(size.node.expr).startswith("256*") for size in sizes), "the compiler knows that vectors fit"
    from_inputs: set[Any] = set()
    factors = []
    for node in graph.graph.nodes:
        if node.op == "placeholder" or from_inputs.intersection(node.all_input_nodes):
            from_inputs.add(node)
        elif node.target is operator.mul:
            factors += [number for number in node.args if isinstance(number, int)]
    assert factors
    assert max(factors) < 2**31


def test_views_of_whatever_memory_compile_nothing_anew() -> None:
    """torch guards what a view is of: each form of it compiled a kernel of its own."""
    graphs = Graphs()
    compiled = graphs.update()
    rule, step_scalars = rule_and_hyper("lion")
    update_slice = make(rule, *random_inputs(2048), FP32, torch.bfloat16)
    allocation = torch.zeros(10, 4096, dtype=torch.uint8)
    for param in (update_slice.param, torch.zeros(4096)[:2048], allocation[1:3].view(-1).view(torch.float32)):
        compiled(rule, [(replace(update_slice, param=param), step_scalars)], 1.0)
    assert len(graphs.made) == 1


def test_sizes_that_are_equal_by_chance_compile_nothing_anew() -> None:
    """As many scales as scalars, or as rows of them: the first such update was compiled for that case alone."""
    graphs = Graphs()
    compiled = graphs.update()
    rule, step_scalars = rule_and_hyper("sgd-momentum", FORMATS[4])
    assert len(step_scalars.scalars) + 1 == 5
    for sizes in ((256 * 5,), (256 * 40,), (256 * 3, 512)):
        inputs = [make(rule, *random_inputs(numel), REMAINDER, torch.bfloat16) for numel in sizes]
        native = [copy_of(update_slice) for update_slice in inputs]
        compiled(rule, [(update_slice, step_scalars) for update_slice in inputs], 0.7)
        for traced, expected in zip(inputs, native, strict=True):
            rule.update(expected, step_scalars, 0.7, None)
            assert_same(traced, expected, sizes)
    assert len(graphs.made) == 1


def test_one_graph_serves_every_segment_of_a_call() -> None:
    graphs = Graphs()
    rule, update_slices = several("lion", REMAINDER, steps=(3, 4, 5))
    update = graphs.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            update(rule, update_slices, 0.7)
    assert len(graphs.made) == 1, "also for one element, and for one block"


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
def test_the_compiler_refuses_no_format_in_one_memory() -> None:
    """It took elements of different dtypes for overlapping ones, and floats of the 8-bit map for inputs."""
    torch._dynamo.reset()
    rule, step_scalars = rule_and_hyper("adagrad", StateFormat("int8"))
    update_slice = in_one_memory(make(rule, *random_inputs(2048), REMAINDER, torch.bfloat16))
    DeviceUpdate(compile_pass(one_pass, "aot_eager"))(rule, [(update_slice, step_scalars)], 0.7)


def test_the_limit_of_compilations_is_named() -> None:
    rule, step_scalars = rule_and_hyper("adamw")
    update = DeviceUpdate(compile_pass(one_pass, "eager"))
    torch._dynamo.reset()
    first, second = (make(rule, *random_inputs(512), STORAGES[k], torch.bfloat16) for k in (1, 0))
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
    update_slice = make(rule, *random_inputs(2048), FP32, torch.bfloat16)
    DeviceUpdate(compile_pass(one_pass))(rule, [(update_slice, step_scalars)], 0.7)
    torch.compile(lambda value: value + 1)(torch.ones(3))
    assert seen[0].items() >= ROUNDING.items()
    assert not (seen[1] or {}).keys() & ROUNDING.keys()
    assert config.get_config_copy() == before


# Which devices have a compiler


@pytest.mark.parametrize(
    ("kind", "hip", "known", "expected"),
    [
        ("cuda", None, True, True),
        ("cuda", None, False, False),  # torch before 2.11
        ("cuda", "6.4", True, False),
        ("xpu", None, True, False),
    ],
)
def test_any_device_that_has_a_compiler_is_compiled_for_and_one_that_rounds_otherwise_is_said_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, known: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    if not known:
        monkeypatch.setattr(device, "ROUNDING", {**device.ROUNDING, "eager_numerics.of_another_torch": True})
    assert device.rounds_as_host(torch.device(kind)) is expected
    asked: list[torch.device] = []
    monkeypatch.setattr(device, "has_compiler", lambda of: bool(asked.append(of)) or True)
    monkeypatch.setattr(device, "rounds_as_host", lambda of: expected)
    monkeypatch.setattr(device, "compile_pass", lambda function: function)
    rule, step_scalars = rule_and_hyper("adamw")
    update_slice = make(rule, *random_inputs(512), FP32, torch.float32)
    update = DeviceUpdate()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            update(rule, [(update_slice, step_scalars)], 1.0)
    said = [f"torch {torch.__version__} compiles the update on cpu" in str(warning.message) for warning in seen]
    assert said == [True] * (not expected)
    assert asked == [torch.device("cpu")], "asked once"


def test_a_compiler_that_fails_is_said_once_and_the_reference_does_the_rest() -> None:
    calls = []

    def fails_at_the_third(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("no compiler for this")
        one_pass(*arguments)

    rule, together = several("lion", REMAINDER)
    alone = [copy_of(update_slice) for update_slice, _ in together]
    update = DeviceUpdate(fails_at_the_third)
    said = r"torch\.compile failed for the update on cpu \(RuntimeError: no compiler for this\)"
    with pytest.warns(UserWarning, match=said):
        update(rule, together, 0.7)
    update(rule, together, 0.7)
    assert len(calls) == 3
    for update_slice, (other, step_scalars) in zip(alone, together, strict=True):
        for _ in range(2):
            update_reference(rule, update_slice, step_scalars, 0.7)
        assert_same(other, update_slice)


# Many segments at once


def test_small_segments_are_updated_together_as_they_are_alone() -> None:
    for row in covering({"name": list(RULES), "storage": STORAGES, "format_": FORMATS}):
        rule, together = several(**row, steps=(3, 3, 4))
        alone = [copy_of(update_slice) for update_slice, _ in together]
        update_in_torch(rule, together, 0.7)
        for update_slice, (other, step_scalars) in zip(alone, together, strict=True):
            update_reference(rule, update_slice, step_scalars, 0.7)
            assert_same(other, update_slice, row)


@pytest.mark.parametrize("allowed", [True, False])
def test_scalars_of_a_device_come_from_pinned_memory_where_memory_may_be_locked(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pageable memory the host would wait for everything that the device was given before."""
    pinned = []

    def pin_memory(values: Tensor) -> Tensor:
        pinned.append(values.tolist())
        if not allowed:
            raise RuntimeError("not allowed")
        return values

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    assert device._on_device([[1.0, 2.0]], torch.float32, torch.device("meta")).shape == (2, 2)
    assert pinned == [2 * [[1.0, 2.0]]], "a row alone is there twice"
