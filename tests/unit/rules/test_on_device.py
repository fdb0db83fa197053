"""What a device computes in torch operations, against the native kernels: the same bits."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import deposit
from penstock.rules.device import update_reference
from penstock.runtime.hardware import default_device
from tests.lib.covering import covering, named
from tests.unit.rules.segments import (
    FORMATS,
    GRADS,
    RULES,
    STORAGES,
    TELLING,
    assert_same,
    assert_same_bits,
    copy_to,
    hard_values,
    make,
    random_inputs,
    rule_and_hyper,
)

ROWS = covering(
    {"name": list(RULES), "storage": STORAGES, "format_": FORMATS},
    first=[dict(zip(("name", "storage", "format_"), row, strict=True)) for row in TELLING],
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a device that is no cpu"),
]


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_the_reference_on_the_device_gives_the_same_bits(row: dict[str, Any]) -> None:
    rule, step_scalars = rule_and_hyper(row["name"], row["format_"])
    hard = hard_values()
    for inputs in (random_inputs(100_003), (hard, hard, (hard, hard.abs(), hard.abs()))):
        host = make(rule, *inputs, row["storage"], torch.bfloat16)
        there = copy_to(host, default_device())
        rule.update(host, step_scalars, 0.7, None)
        update_reference(rule, there, step_scalars, 0.7)
        assert_same(copy_to(there, torch.device("cpu")), host)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
def test_the_device_deposits_the_same_values(add: bool) -> None:
    device, numel = default_device(), 100_003
    # The host sums squares in fp64, the device in fp32 and in an order of its own. All terms are positive, so each
    # addition is off by 2^-24 of the sum at most, in a direction as good as random: n of them by about sqrt(n) times
    # that, in whatever order. The root is rounded once more, and its square doubles that.
    tolerance = (math.sqrt(numel) + 2) * 2**-24
    generator = torch.Generator().manual_seed(0)
    for dst_dtype, src_dtype in product(GRADS, GRADS):
        dst = torch.randn(numel, generator=generator).to(dst_dtype)
        src = torch.randn(numel, generator=generator).to(src_dtype)
        dst_there = dst.to(device)
        norm_there = deposit(dst_there, src.to(device), add=add, pool=None)
        norm = deposit(dst, src, add=add, pool=None)
        assert_same_bits(dst_there.cpu(), dst)
        assert isinstance(norm_there, Tensor)
        assert norm_there.device == device
        assert norm_there.item() == pytest.approx(norm, rel=tolerance)
