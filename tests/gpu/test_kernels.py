"""What the compiler makes of the updates, read: the host's roundings, and memory in vectors.

Needs CUDA and Triton, and runs no kernel: a GPU that is not there, whose kernels do nothing, will do.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from penstock.rules import StateFormat
from penstock.rules.device import DeviceUpdate, compile_pass, one_pass
from penstock.rules.wire import WireName, pack_words, unpack_words
from tests.unit.rules.segments import TELLING, copy_to, make, random_inputs, rule_and_hyper

NUMEL = 1 << 20
#: Operations on an element of fp32, beside those of its storage: products that are added as they are, other products,
#: sums, differences, quotients and roots. They are those of csrc, operation by operation.
OPERATIONS: dict[str, dict[str, int]] = {
    "adamw": {"fma": 2, "mul": 5, "add": 2, "sub": 1, "div": 2, "sqrt": 1},
    "adam-l2": {"fma": 3, "mul": 5, "add": 2, "sub": 1, "div": 2, "sqrt": 1},
    "amsgrad": {"fma": 2, "mul": 5, "add": 2, "sub": 1, "div": 2, "sqrt": 1},
    "sgd": {"fma": 2, "mul": 1},
    "sgd-momentum": {"fma": 2, "mul": 2},
    "sgd-nesterov": {"fma": 4, "mul": 2},
    "adagrad": {"fma": 2, "mul": 2, "add": 2, "div": 1, "sqrt": 1},
    "lion": {"fma": 3, "mul": 4, "sub": 1},
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, or what stands in for it"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="Triton compiles nothing"),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that Triton compiles, as they come."""
    import triton

    compiled: list[Any] = []
    compiler: Callable[..., Any] = triton.compile

    def noting(*arguments: Any, **options: Any) -> Any:
        compiled.append(compiler(*arguments, **options))
        return compiled[-1]

    monkeypatch.setattr(triton, "compile", noting)
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        yield compiled


def assert_rounded_as_on_the_host(ptx: str) -> None:
    """No operation may be contracted with another, each rounds to nearest, and denormals are kept."""
    assert ".ftz" not in ptx
    arithmetic = set(re.findall(r"\b((?:mul|add|sub|div|sqrt|fma)\.[\w.]*f(?:32|64))\b", ptx))
    assert {name for name in arithmetic if ".rn." not in name} == set()
    assert not re.search(r"\b(?:rcp|rsqrt|ex2|lg2)\.", ptx)
    assert ".f64" not in ptx, "a device of few units for fp64 would wait for them"


def sass_of(kernel: Any) -> Counter[str]:
    """Count the instructions of the machine itself."""
    from triton.tools.disasm import get_sass

    return Counter(re.findall(r"\s([A-Z][A-Z0-9]+(?:\.\w+)*)\s", get_sass(kernel.asm["cubin"])))


@pytest.mark.parametrize(("name", "storage", "format_"), TELLING, ids=str)
def test_updates_are_compiled_to_the_hosts_operations_on_vectors(
    kernels: list[Any], name: str, storage: tuple[Any, Any], format_: StateFormat
) -> None:
    rule, step_scalars = rule_and_hyper(name, format_)
    segment = copy_to(make(rule, *random_inputs(NUMEL), storage, torch.bfloat16), torch.device("cuda"))
    DeviceUpdate(compile_pass(one_pass))(rule, [(segment, step_scalars)], 0.7)
    assert kernels
    scalars = 1 + len(step_scalars.scalars)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert_rounded_as_on_the_host(ptx)
        # Of 8 bits two are read as 16: a thread has two elements, or more.
        one = "8" if format_.dtype == "int8" else "(?:8|16)"
        assert not re.search(rf"\b(?:ld|st)\.global\.b{one}\b", ptx), "elements are read or written one by one"
    whole = [kernel for kernel in kernels if "fma.rn.f32" in kernel.asm["ptx"]]
    assert any(re.search(r"\bld\.global\.v4\.b32\b", kernel.asm["ptx"]) for kernel in whole)
    if format_.dtype == "int8":
        return  # several kernels, and the operations of encoding
    for kernel in whole:
        ptx = kernel.asm["ptx"]
        found = Counter(re.findall(r"\b(mul|add|sub|div|sqrt|fma)\.rn\.f32\b", ptx))
        elements = found["fma"] // OPERATIONS[name]["fma"]
        assert found == {operation: elements * count for operation, count in OPERATIONS[name].items()}
        assert len(re.findall(r"\bld\.global\.b32\b", ptx)) <= scalars + 2 * elements
        if "div" not in OPERATIONS[name]:  # a quotient or a root to nearest is made of many such instructions
            sass = sass_of(kernel)
            assert sass["FFMA"] == found["fma"]
            assert not [instruction for instruction in sass if "FTZ" in instruction]


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_wire_formats_are_compiled_to_the_hosts_operations(kernels: list[Any], name: WireName) -> None:
    values = torch.ones(NUMEL, dtype=torch.bfloat16, device="cuda")
    words = torch.zeros(NUMEL // 256, 33 if name == "int4" else 65, dtype=torch.int32, device="cuda")
    compile_pass(pack_words)(name, values, words)
    compile_pass(unpack_words)(name, values.float(), words, True)
    assert any("div.rn.f32" in kernel.asm["ptx"] for kernel in kernels), "the scale is a quotient to nearest"
    for kernel in kernels:
        assert_rounded_as_on_the_host(kernel.asm["ptx"])
