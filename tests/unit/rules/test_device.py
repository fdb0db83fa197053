"""The function that accelerators run, here on the cpu: near the native update, and one graph for the compiler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import StateFormat
from penstock.rules.device import DeviceUpdate, one_pass
from penstock.rules.fused import update_reference
from penstock.rules.storage import read_state
from tests.unit.rules.segments import FORMATS, RULES, STORAGES, copy_of, make, parts, random_inputs, rule_and_hyper

Check = Callable[[Tensor, Tensor], None]
formats = pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")


@formats
@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, STORAGES[2]) for name in RULES), *(("adamw", storage) for storage in STORAGES)],
    ids=str,
)
def test_one_pass_is_near_the_native_update(name: str, storage: tuple[Any, Any], format_: StateFormat) -> None:
    rule, hyper = rule_and_hyper(name, format_)
    native = make(rule, *random_inputs(2000), storage, torch.bfloat16)
    device = copy_of(native)
    rule.update(native, hyper, 0.7, None)
    DeviceUpdate(one_pass)(rule, device, hyper, 0.7, update_reference)
    torch.testing.assert_close(device.param.float(), native.param.float(), rtol=2e-2, atol=1e-6)
    equal = (device.param == native.param).float().mean()
    assert equal > (0.9 if storage[0] == torch.float32 else 0.99)
    for k, spec in enumerate(rule.states[: rule.used(hyper)]):
        a, b = (read_state(spec, s.states[k], s.scale(k)) for s in (device, native))
        # A last bit decides between neighbours of a coarse grid now and then.
        torch.testing.assert_close(a, b, rtol={"fp32": 1e-6, "bf16": 1e-2, "int8": 1.0}[format_.dtype], atol=1e-6)
        assert (a == b).float().mean() > 0.5


@pytest.mark.parametrize("format_", [FORMATS[0], FORMATS[3], FORMATS[4]], ids=lambda f: f.dtype)
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov", "adagrad", "lion"])
def test_one_graph_serves_every_step(name: str, format_: StateFormat, assert_same_bits: Check) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = DeviceUpdate(torch.compile(one_pass, backend=backend, fullgraph=True, dynamic=True))
    for step, numel in ((3, 2048), (4, 2048), (5, 2000), (6, 1111)):
        rule, hyper = rule_and_hyper(name, format_, step=step)
        plain = make(rule, *random_inputs(numel), (torch.bfloat16, torch.int16), torch.bfloat16)
        traced = copy_of(plain)
        DeviceUpdate(one_pass)(rule, plain, hyper, 0.1 * step, update_reference)
        compiled(rule, traced, hyper, 0.1 * step, update_reference)
        for (_, a), (_, b) in zip(parts(traced), parts(plain), strict=True):
            assert_same_bits(a, b)
    assert len(graphs) <= 2


def test_a_compiler_that_fails_is_said_once_and_the_reference_runs(assert_same_bits: Check) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler")

    rule, hyper = rule_and_hyper("adamw")
    expected = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    actual = copy_of(expected)
    update = DeviceUpdate(broken)
    with pytest.warns(UserWarning, match=r"torch\.compile failed for the update on cpu \(RuntimeError: no compiler\)"):
        update(rule, actual, hyper, 1.0, update_reference)
    update(rule, actual, hyper, 1.0, update_reference)
    for _ in range(2):
        update_reference(rule, expected, hyper, 1.0)
    assert_same_bits(actual.param, expected.param)


def test_without_a_compiler_the_reference_runs(assert_same_bits: Check) -> None:
    rule, hyper = rule_and_hyper("lion")
    expected = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    actual = copy_of(expected)
    rule.on_device(rule, actual, hyper, 1.0, update_reference)
    update_reference(rule, expected, hyper, 1.0)
    assert_same_bits(actual.param, expected.param)
