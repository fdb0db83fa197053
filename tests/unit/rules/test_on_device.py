"""What a CUDA device computes in torch operations, against the native kernels: the same bits."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import Segment, deposit
from penstock.rules.adam import Adam
from tests.unit.rules.segments import STORAGES, hypers, make, parts, random_inputs

Check = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_device_updates_to_the_same_bits(
    storage: tuple[Any, Any], hard_fp32: Tensor, assert_same_bits: Check
) -> None:
    for hyper, inputs in product(
        hypers(), (random_inputs(100_003), (hard_fp32, hard_fp32, (hard_fp32, hard_fp32.abs())))
    ):
        on_host = make(*inputs, storage, torch.bfloat16)
        on_device = Segment(
            on_host.param.cuda(),
            on_host.grad.cuda(),
            None if on_host.master is None else on_host.master.cuda(),
            (on_host.states[0].cuda(), on_host.states[1].cuda()),
        )
        Adam("adam").update(on_host, hyper, 0.7, None)
        Adam("adam").update(on_device, hyper, 0.7, None)
        for result, reference in zip(parts(on_device), parts(on_host), strict=True):
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
