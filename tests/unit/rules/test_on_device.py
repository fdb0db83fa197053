"""What a CUDA device computes in torch operations, against the native kernels: the same bits."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import Segment, StateFormat, deposit
from penstock.rules.fused import update_reference
from tests.unit.rules.segments import FORMATS, RULES, STORAGES, make, parts, random_inputs, rule_and_hyper

Check = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(segment: Segment) -> Segment:
    return Segment(
        segment.param.cuda(),
        segment.grad.cuda(),
        None if segment.master is None else segment.master.cuda(),
        tuple(state.cuda() for state in segment.states),
        tuple(None if scale is None else scale.cuda() for scale in segment.scales),
        segment.first,
    )


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f"{f.dtype}-{f.rounding}")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_reference_on_the_device_gives_the_same_bits(
    storage: tuple[Any, Any], name: str, format_: StateFormat, hard_fp32: Tensor, assert_same_bits: Check
) -> None:
    rule, hyper = rule_and_hyper(name, format_)
    hard = (hard_fp32, hard_fp32, (hard_fp32, hard_fp32.abs(), hard_fp32.abs()))
    for inputs in (random_inputs(100_003), hard):
        host = make(rule, *inputs, storage, torch.bfloat16)
        device = on_device(host)
        rule.update(host, hyper, 0.7, None)
        update_reference(rule, device, hyper, 0.7)
        for (_, result), (_, reference) in zip(parts(device), parts(host), strict=True):
            assert_same_bits(result.cpu(), reference)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
def test_the_device_deposits_the_same_values(add: bool, assert_same_bits: Check) -> None:
    for dst_dtype, src_dtype in product(DTYPES, DTYPES):
        dst, src = torch.randn(100_003).to(dst_dtype), torch.randn(100_003).to(src_dtype)
        dst_device = dst.cuda()
        norm_device = deposit(dst_device, src.cuda(), add=add, pool=None)
        norm = deposit(dst, src, add=add, pool=None)
        assert_same_bits(dst_device.cpu(), dst)
        assert isinstance(norm_device, Tensor)
        assert norm_device.item() == pytest.approx(norm, rel=1e-12)
