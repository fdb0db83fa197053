"""The planner's step beside the strict device's, in modelled time: the same bandwidth, the same time of a kernel."""

import pytest
import torch

import penstock
from tests.lib.models import llama
from tests.modelled import Case, measured, predicted

ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
LINK, KERNEL = 1e8, 1e-5


def small() -> torch.nn.Module:
    model = llama(2, 64, num_attention_heads=4, num_key_value_heads=2)
    model.set_attn_implementation("sdpa")
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


# One micro-batch, and updates that nothing else runs beside: what a thread of updates waited for counts as known to all
# of the host's threads, so the device models kernels beside such threads later than they need be.
ROWS = [
    Case("link", small, batch, ON_CPU, LINK, 1e-15),
    Case("link and kernels", small, batch, ON_CPU, LINK, KERNEL),
    Case("state alone", small, batch, penstock.Placement(grads="cpu", optimizer="cpu"), LINK, KERNEL),
]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_a_planned_step_takes_what_it_takes(case: Case) -> None:
    assert predicted(case) == pytest.approx(measured(case), rel=0.04)
