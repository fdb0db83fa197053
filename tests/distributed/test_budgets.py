"""What is counted of a rank's device before anything is taken, on two ranks; and a refusal on one of them."""

import pytest
import torch

import penstock
from penstock import MemoryBudgetError, Options, Placement
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate
from tests.measured import PLACEMENTS, deep, measured

ROWS = [
    (0, "bf16", PLACEMENTS[0]),
    (1, "fp32", PLACEMENTS[2]),
    (2, "bf16", PLACEMENTS[5]),
    (3, "bf16", PLACEMENTS[0]),
    (3, "bf16", PLACEMENTS[1]),
]


def on_two_ranks(rank: int) -> None:
    for stage, precision, (params, grads, optimizer) in ROWS:
        placement = Placement(params=params, grads=grads, optimizer=optimizer, nvme_path=disks()[0])
        measured(stage, precision, placement, separate())
    # Of one rank that has too little, the other one hears; and both can go on.
    model = deep()
    limit = Options(device_bytes=1000) if rank == 1 else Options()
    with pytest.raises(penstock.PenstockError) as caught:
        prepare_on(inline(), model, torch.optim.AdamW(model.parameters()), options=limit)
    assert "device_bytes=1,000" in str(caught.value)
    assert isinstance(caught.value, MemoryBudgetError) == (rank == 1)


def test_what_is_counted_is_what_ranks_take_and_a_refusal_on_one_is_one_on_both() -> None:
    run_ranks(on_two_ranks, 2)
