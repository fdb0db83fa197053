"""Many segments at once on a device: the bits of one by one, in fewer operations, and the host waits for nothing."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.rules import StateFormat, UpdateSlice, device
from penstock.rules.device import DeviceUpdate, compile_pass, one_pass, update_in_torch, update_reference
from penstock.rules.fused import FusedRule, FusedScalars
from penstock.rules.rule import BLOCK_NUMEL
from tests.unit.rules.segments import FORMATS, RULES, STORAGES, copy_of, make, parts, random_inputs, rule_and_hyper

Check = Callable[[Tensor, Tensor], None]
REMAINDER, FULL = STORAGES[2], STORAGES[3]
SIZES = (300, 2048, 1, 777, 256)
#: Operations that launch nothing: they look at memory that is there, or take some.
VIEWS = ("view", "slice", "select", "unbind", "split", "split_with_sizes", "detach", "alias", "unsqueeze", "empty")


class Launches(TorchDispatchMode):
    """Counts the operations that would each be a kernel or a copy on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], Any]) -> int:
    with Launches() as found:
        work()
    return found.counted.total()


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


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_small_segments_are_updated_together_as_they_are_alone(
    name: str, storage: tuple[Any, Any], format_: StateFormat, assert_same_bits: Check
) -> None:
    rule, together = several(name, storage, format_, steps=(3, 3, 4))
    alone = [copy_of(update_slice) for update_slice, _ in together]
    update_in_torch(rule, together, 0.7)
    for update_slice, (other, step_scalars) in zip(alone, together, strict=True):
        update_reference(rule, update_slice, step_scalars, 0.7)
        for (_, a), (_, b) in zip(parts(other), parts(update_slice), strict=True):
            assert_same_bits(a, b)


def test_batches_hold_no_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries are bounded by the piece, however many update_slices there are."""
    seen = []

    def note(rule: FusedRule, update_slice: UpdateSlice, *rest: Any) -> None:
        seen.append(update_slice.param.numel())
        update_reference(rule, update_slice, *rest)

    monkeypatch.setattr("penstock.rules.device.PIECE_NUMEL", 1000)
    monkeypatch.setattr("penstock.rules.device.update_reference", note)
    rule, update_slices = several("adamw", REMAINDER)
    update_in_torch(rule, update_slices, 0.7)
    assert seen == [300, 2048, 1 + 777, 256]


@pytest.mark.parametrize(("storage", "most"), [(REMAINDER, 60), (FULL, 59)], ids=str)
def test_adamw_without_a_compiler_takes_no_more_operations_than_this(storage: tuple[Any, Any], most: int) -> None:
    rule, step_scalars = rule_and_hyper("adamw")
    update_slice = make(rule, *random_inputs(2048), storage, torch.bfloat16)
    assert launches(lambda: update_reference(rule, update_slice, step_scalars, 0.7)) <= most


def test_many_small_segments_take_hardly_more_operations_than_one() -> None:
    rule, update_slices = several("adamw", REMAINDER)
    alone = launches(lambda: update_in_torch(rule, update_slices[:1], 0.7))
    # Five arrays together, four apart again.
    assert launches(lambda: update_in_torch(rule, update_slices, 0.7)) <= alone + 9


@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3]], ids=lambda f: f.dtype)
def test_scalars_reach_the_device_in_two_copies_however_many_segments_there_are(
    format_: StateFormat, monkeypatch: pytest.MonkeyPatch, assert_same_bits: Check
) -> None:
    copies = []
    on_device = device._on_device

    def note(rows: list[list[Any]], *rest: Any) -> Tensor:
        copies.append(len(rows))
        return on_device(rows, *rest)

    monkeypatch.setattr(device, "_on_device", note)
    rule, together = several("adamw", REMAINDER, format_, steps=(3, 4))
    alone = [copy_of(update_slice) for update_slice, _ in together]
    DeviceUpdate(one_pass)(rule, together, 0.7)
    pieces = len(SIZES) + 1  # 777 are three blocks and a rest
    assert copies == [2, pieces if format_.stochastic else 1], "what is equal is there once"
    for update_slice, (other, step_scalars) in zip(alone, together, strict=True):
        DeviceUpdate(one_pass)(rule, [(update_slice, step_scalars)], 0.7)
        for (_, a), (_, b) in zip(parts(other), parts(update_slice), strict=True):
            assert_same_bits(a, b)


def test_scalars_of_a_device_come_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory the host would wait for everything that the device was given before."""
    pinned = []

    def pin_memory(values: Tensor) -> Tensor:
        pinned.append(values.tolist())
        return values

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    device._on_device([[1.0, 2.0]], torch.float32, torch.device("meta"))
    assert pinned == [2 * [[1.0, 2.0]]], "a row alone is there twice"


def test_where_memory_may_not_be_locked_scalars_come_from_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_memory(values: Tensor) -> Tensor:
        raise RuntimeError("not allowed")

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    assert device._on_device([[1.0, 2.0]], torch.float32, torch.device("meta")).shape == (2, 2)


def test_one_graph_serves_every_segment_of_a_call() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    rule, update_slices = several("adamw", REMAINDER, steps=(3, 4, 5))
    update = DeviceUpdate(compile_pass(one_pass, backend))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            update(rule, update_slices, 0.7)
    assert len(graphs) == 1, "also for one element, and for one block"


def test_a_compiler_that_fails_midway_leaves_the_rest_to_the_reference(assert_same_bits: Check) -> None:
    calls = []

    def fails_at_the_third(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("no compiler for this")
        one_pass(*arguments)

    rule, together = several("lion", REMAINDER)
    alone = [copy_of(update_slice) for update_slice, _ in together]
    with pytest.warns(UserWarning, match=r"torch\.compile failed for the update on cpu"):
        DeviceUpdate(fails_at_the_third)(rule, together, 0.7)
    for number, (update_slice, (other, step_scalars)) in enumerate(zip(alone, together, strict=True)):
        if number < 2:
            DeviceUpdate(one_pass)(rule, [(update_slice, step_scalars)], 0.7)
        else:
            update_reference(rule, update_slice, step_scalars, 0.7)
        for (_, a), (_, b) in zip(parts(other), parts(update_slice), strict=True):
            assert_same_bits(a, b)
