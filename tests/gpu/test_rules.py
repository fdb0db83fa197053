"""The compiled update of a segment on the device, against the native one on the host: the same bits."""

from typing import Any

import pytest
import torch

from penstock.rules import StateFormat
from penstock.rules.compiler import compile_pass
from penstock.rules.device import DeviceUpdate, one_pass
from penstock.rules.fused import update_in_torch
from tests.support import thorough
from tests.unit.rules.segments import (
    TELLING,
    copy_to,
    differences,
    hard_inputs,
    make,
    random_inputs,
    rule_and_hyper,
    telling_first,
)

# The compiler takes many seconds for a row on a cpu: there one, with states and parameter rounded by random bits.
ROWS = (
    [row if telling else thorough(*row) for row, telling in telling_first()]
    if torch.accelerator.is_available()
    else [TELLING[1]]
)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize(("name", "storage", "format_"), ROWS, ids=str)
def test_the_compiled_update_gives_the_hosts_bits(
    device: torch.device, name: str, storage: tuple[Any, Any], format_: StateFormat
) -> None:
    update = DeviceUpdate(compile_pass(one_pass))
    wrong: dict[str, list[str]] = {}
    inputs = {"random": random_inputs(100_000), "ragged": random_inputs(5001), "hard": hard_inputs()}
    for step, (kind, values) in enumerate(inputs.items(), 3):
        rule, hyper = rule_and_hyper(name, format_, step)
        host = make(rule, *values, storage, torch.bfloat16)
        there = copy_to(host, device)
        rule.update(host, hyper, 0.7, None)
        update(rule, [(there, hyper)], 0.7, update_in_torch)
        wrong[kind] = differences(copy_to(there, torch.device("cpu")), host)
    assert not any(wrong.values()), wrong
