"""The planner's step beside the strict device's, in modelled time: the same bandwidth, the same time of a kernel."""

import pytest
import torch

import penstock
from tests.device.test_schedule import llama
from tests.modelled import Case, measured, predicted

ON_CPU = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
LINK, KERNEL = 1e8, 1e-5


def small() -> torch.nn.Module:
    model = llama(2)
    model.set_attn_implementation("eager")
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


ROWS = [
    Case("link", small, batch, ON_CPU, LINK, 1e-15),
    Case("link and kernels", small, batch, ON_CPU, LINK, KERNEL),
    # Not slower: the device does not model that one thread of the host waits for another, which adds micro-batches.
    Case("three micro-batches", small, batch, ON_CPU, 10 * LINK, KERNEL, micro_batches=3),
    Case("updates beside forward", small, batch, penstock.Placement(grads="cpu", optimizer="cpu"), LINK, KERNEL,
         overlap="forward"),
]  # fmt: skip


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_a_planned_step_takes_what_it_takes(case: Case) -> None:
    assert predicted(case) == pytest.approx(measured(case), rel=0.04)
