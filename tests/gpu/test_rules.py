"""What is compiled for the device, updates and wire formats, against the native passes of the host: the same bits."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import StateFormat
from penstock.rules.device import DeviceUpdate, compile_pass, one_pass
from penstock.rules.wire import WireFormat, WireName, pack_words, unpack_words
from tests.unit.rules.segments import (
    TELLING,
    copy_to,
    differences,
    hard_inputs,
    hard_values,
    make,
    random_inputs,
    rule_and_hyper,
    same_bits,
)

# The compiler takes many seconds for a row on a cpu: there one, with states and parameter rounded by random bits.
ROWS = TELLING if torch.accelerator.is_available() else [TELLING[1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize(("name", "storage", "format_"), ROWS, ids=str)
def test_the_compiled_update_gives_the_hosts_bits(
    device: torch.device, name: str, storage: tuple[Any, Any], format_: StateFormat
) -> None:
    update = DeviceUpdate(compile_pass(one_pass))
    wrong: dict[str, list[str]] = {}
    every = 5 if os.environ.get("TRITON_INTERPRET") else 1  # which takes minutes for so many
    inputs = {"random": random_inputs(100_000 // every**2), "ragged": random_inputs(5001), "hard": hard_inputs(every)}
    for step, (kind, values) in enumerate(inputs.items(), 3):
        rule, step_scalars = rule_and_hyper(name, format_, step)
        host = make(rule, *values, storage, torch.bfloat16)
        there = copy_to(host, device)
        rule.update(host, step_scalars, 0.7, None)
        update(rule, [(there, step_scalars)], 0.7)
        wrong[kind] = differences(copy_to(there, torch.device("cpu")), host)
    assert not any(wrong.values()), wrong


@pytest.mark.slow
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="the compiler takes many seconds for a row on a cpu")
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_compiled_wire_formats_give_the_hosts_bits(device: torch.device, name: WireName) -> None:
    form = WireFormat(name)
    hard = hard_values()[: 64 * 256]
    for values in (random_inputs(100 * 256)[1].bfloat16(), hard):
        packed = torch.empty(form.packed_bytes(values.numel()), dtype=torch.uint8)
        found = torch.ones(values.numel())
        form.pack(values, packed)
        form.unpack(packed, found, add=True)
        packed_there, found_there = torch.empty_like(packed, device=device), torch.ones(values.numel(), device=device)
        compile_pass(pack_words)(name, values.to(device), form._words(packed_there))
        compile_pass(unpack_words)(name, found_there, form._words(packed.to(device)), True)
        assert same_bytes(packed_there.cpu(), packed, form).all()
        assert same_bits(found_there.cpu(), found).all()


def same_bytes(actual: Tensor, expected: Tensor, form: WireFormat) -> Tensor:
    """Where packed blocks are equal, word by word; a scale that is NaN is one, whatever its payload."""
    a, b = form._words(actual), form._words(expected)
    same = a == b
    same[:, 0] |= a[:, 0].view(torch.float32).isnan() & b[:, 0].view(torch.float32).isnan()
    return same
