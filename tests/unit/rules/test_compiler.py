"""Which devices torch compiles kernels for, with devices that are made up."""

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo import device_interface
from torch._inductor.codegen import common

from penstock.rules import device
from penstock.rules.device import DeviceUpdate, has_compiler
from tests.unit.rules.segments import make, random_inputs, rule_and_hyper

DEVICE = torch.device("xpu")


class Capable(device_interface.DeviceInterface):
    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return True

    @classmethod
    def raise_if_triton_unavailable(cls, device: Any = None) -> None:
        pass


class TooOld(Capable):
    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return False


class OfAnotherMake(Capable):
    @classmethod
    def raise_if_triton_unavailable(cls, device: Any = None) -> None:
        raise RuntimeError("triton not built with the 'intel' backend")


class OtherKernels(device_interface.DeviceInterface):
    pass


def torch_with(
    patch: pytest.MonkeyPatch, interface: type | None, *, scheduling: object = object, triton: bool = True
) -> None:
    interfaces = {} if interface is None else {DEVICE.type: interface, "cuda": interface}
    patch.setattr(device_interface, "get_registered_device_interfaces", interfaces.items)
    patch.setattr(common, "init_backend_registration", lambda: None)
    patch.setattr(common, "get_scheduling_for_device", {DEVICE.type: scheduling}.get)
    patch.setattr(device, "find_spec", lambda name: object() if triton and name == "triton" else None)


@pytest.mark.parametrize(
    ("interface", "rest", "expected"),
    [
        (Capable, {}, True),
        (Capable, {"triton": False}, False),
        (Capable, {"scheduling": None}, False),
        (None, {}, False),
        (TooOld, {}, False),
        (OfAnotherMake, {}, False),
        (OtherKernels, {"triton": False}, True),
    ],
)
def test_a_device_has_a_compiler_where_inductor_has_a_way_for_it(
    monkeypatch: pytest.MonkeyPatch, interface: type | None, rest: dict[str, Any], expected: bool
) -> None:
    torch_with(monkeypatch, interface, **rest)
    assert has_compiler(DEVICE) is expected


def test_a_cpu_needs_none() -> None:
    assert not has_compiler(torch.device("cpu"))


def test_this_torch_has_what_is_asked_of_it() -> None:
    """Its parts are not public. A type that nobody knows has no compiler, and no part of torch is missed on the way."""
    assert not has_compiler(torch.device("hpu"))
    assert callable(device_interface.get_registered_device_interfaces)
    common.init_backend_registration()
    assert common.get_scheduling_for_device("xpu") is not None


@pytest.mark.parametrize("name", ["init_backend_registration", "get_scheduling_for_device"])
@pytest.mark.parametrize("triton", [True, False])
def test_a_torch_of_another_inside_compiles_as_ever(monkeypatch: pytest.MonkeyPatch, name: str, triton: bool) -> None:
    torch_with(monkeypatch, Capable, triton=triton)
    monkeypatch.delattr(common, name)
    assert has_compiler(torch.device("cuda")) is triton
    assert not has_compiler(DEVICE)


def test_an_update_is_compiled_for_any_device_that_has_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(device, "has_compiler", lambda of: bool(asked.append(of)) or True)
    monkeypatch.setattr(device, "rounds_as_host", lambda of: True)
    monkeypatch.setattr(device, "compile_pass", lambda function: function)
    rule, hyper = rule_and_hyper("adamw")
    segment = make(rule, *random_inputs(300), (torch.float32, None), torch.float32)
    update = DeviceUpdate()
    for _ in range(2):
        update(rule, [(segment, hyper)], 1.0, fail)
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
    rule, hyper = rule_and_hyper("adamw")
    segment = make(rule, *random_inputs(512), (torch.float32, None), torch.float32)
    update = DeviceUpdate()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            update(rule, [(segment, hyper)], 1.0, fail)
    assert [f"torch {torch.__version__} compiles them" in str(warning.message) for warning in seen] == [True] * (
        not expected
    )


def fail(*_: object) -> None:
    raise AssertionError("the compiled pass was not used")
