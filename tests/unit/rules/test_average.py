"""How an average changes places with parameters, whatever their bits; what it is: `tests/parity/test_averages.py`."""

import pytest
import torch
from torch import Tensor

from penstock.rules.average import hide, show
from penstock.rules.formats import read_master, write_master
from tests.parity.rows import round_half_away
from tests.unit.rules.segments import STORAGES

NUMEL = 1000


def any_values(seed: int) -> Tensor:
    """Every sign and magnitude, zeros of both signs, infinities."""
    bits = torch.randint(
        -(2**31), 2**31 - 1, (NUMEL,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )
    values = bits.view(torch.float32)
    values[torch.isnan(values)] = 1.5
    values[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    return values


def weights(param: torch.dtype, master: torch.dtype | None, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    found = torch.empty(NUMEL, dtype=param), None if master is None else torch.empty(NUMEL, dtype=master)
    write_master(*found, any_values(seed))
    return found


def bits(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize(("dtype", "master_dtype"), STORAGES, ids=str)
def test_what_is_shown_and_hidden_comes_back_bit_for_bit(dtype: torch.dtype, master_dtype: torch.dtype | None) -> None:
    average = any_values(1)
    param, master = weights(dtype, master_dtype)
    before = [bits(t) for t in (average, param, master)]
    wanted = torch.empty_like(param), None if master is None else torch.empty_like(master)
    write_master(*wanted, average)
    show(average, param, master)
    if master_dtype is None and dtype == torch.bfloat16:
        assert torch.equal(read_master(param, master), round_half_away(any_values(1)).float())
    else:
        assert torch.equal(param, wanted[0])
        assert master is None or torch.equal(master, wanted[1])
    hide(average, param, master)
    assert [bits(t) for t in (average, param, master)] == before
