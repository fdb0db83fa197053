"""Which devices torch compiles kernels for, with devices that are made up."""

import warnings

import pytest
import torch

from penstock.rules import device
from penstock.rules.device import DeviceUpdate, has_compiler
from tests.unit.rules.segments import make, random_inputs, rule_and_hyper


@pytest.mark.parametrize(
    ("kind", "triton", "expected"),
    [("cuda", True, True), ("xpu", True, True), ("cuda", False, False), ("cpu", True, False), ("hpu", True, False)],
)
def test_a_device_has_a_compiler_where_triton_is_for_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, triton: bool, expected: bool
) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: object() if triton and name == "triton" else None)
    assert has_compiler(torch.device(kind)) is expected


def test_an_update_is_compiled_for_any_device_that_has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(device, "has_compiler", lambda of: bool(asked.append(of)) or True)
    monkeypatch.setattr(device, "rounds_as_host", lambda of: True)
    monkeypatch.setattr(device, "compile_pass", lambda function: function)
    rule, step_scalars = rule_and_hyper("adamw")
    update_slice = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    update = DeviceUpdate()
    for _ in range(2):
        update(rule, [(update_slice, step_scalars)], 1.0)
    assert asked == [torch.device("cpu")], "asked once"


@pytest.mark.parametrize(
    ("kind", "hip", "known", "expected"),
    [
        ("cuda", None, True, True),
        ("cuda", None, False, False),  # torch before 2.11
        ("cuda", "6.4", True, False),
        ("xpu", None, True, False),
    ],
)
def test_a_compiler_that_rounds_otherwise_is_said_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, known: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    if not known:
        monkeypatch.setattr(device, "ROUNDING", {**device.ROUNDING, "eager_numerics.of_another_torch": True})
    assert device.rounds_as_host(torch.device(kind)) is expected
    monkeypatch.setattr(device, "has_compiler", lambda of: True)
    monkeypatch.setattr(device, "rounds_as_host", lambda of: expected)
    monkeypatch.setattr(device, "compile_pass", lambda function: function)
    rule, step_scalars = rule_and_hyper("adamw")
    update_slice = make(rule, *random_inputs(512), (torch.float32, None), torch.float32)
    update = DeviceUpdate()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            update(rule, [(update_slice, step_scalars)], 1.0)
    assert [f"torch {torch.__version__} compiles the update on cpu" in str(warning.message) for warning in seen] == [
        True
    ] * (not expected)
