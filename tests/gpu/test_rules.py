"""The compiled update of a segment on the device, against the native one on the host."""

from itertools import product
from typing import Any

import pytest
import torch

from penstock.rules import Segment, StateFormat
from penstock.rules.device import DeviceUpdate, compile_pass
from penstock.rules.fused import update_in_torch
from tests.unit.rules.segments import FORMATS, RULES, STORAGES, assert_near, make, random_inputs, rule_and_hyper

# The compiler takes many seconds for a row on a cpu: there one, with states and parameter rounded by random bits.
ROWS: list[tuple[str, tuple[Any, Any], StateFormat]] = (
    list(product(RULES, STORAGES, FORMATS))
    if torch.accelerator.is_available()
    else [("lion", (torch.bfloat16, None), FORMATS[3])]
)


def to(segment: Segment, device: torch.device) -> Segment:
    return Segment(
        segment.param.to(device, copy=True),
        segment.grad.to(device, copy=True),
        None if segment.master is None else segment.master.to(device, copy=True),
        tuple(state.to(device, copy=True) for state in segment.states),
        tuple(None if scale is None else scale.to(device, copy=True) for scale in segment.scales),
        segment.first,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("error:torch.compile failed")
@pytest.mark.parametrize(("name", "storage", "format_"), ROWS, ids=str)
def test_the_compiled_update_is_near_the_hosts(
    device: torch.device, name: str, storage: tuple[Any, Any], format_: StateFormat
) -> None:
    update = DeviceUpdate(compile_pass())
    for step, numel in ((3, 2000), (4, 5000)):
        rule, hyper = rule_and_hyper(name, format_, step)
        host = make(rule, *random_inputs(numel), storage, torch.bfloat16)
        there = to(host, device)
        rule.update(host, hyper, 0.7, None)
        update(rule, [(there, hyper)], 0.7, update_in_torch)
        assert_near(to(there, torch.device("cpu")), host, rule, hyper)
