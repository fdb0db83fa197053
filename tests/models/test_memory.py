"""Gathered parameters: none is left behind, and together they stay within `live_bytes`."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.unit.unit import UnitState
from tests.lib.streams import simulated
from tests.models.adapters_rows import ADAPTERS
from tests.models.contract import ON_CPU, RECORDED, build, prepared
from tests.models.family import Batch, Family
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES
from tests.models.transformers_rows import TRANSFORMERS

FAMILIES = [*GRAPHS, *TRANSFORMERS[::4], *MODULES[::4], *ADAPTERS[:1]]
NEEDS_GRAD = {"gradients_in_between"}
# A unit whose output nobody can look into stays gathered, as one whose backward was recorded does.
UNBOUNDED = {"output_closed_object", "output_closed_object_beside_tensor", "output_generator", *RECORDED}


def with_live_bytes(family: Family, live_bytes: int) -> tuple[nn.Module, penstock.Optimizer]:
    model = build(family, "fp32")
    options = penstock.Options(live_bytes=live_bytes)
    family = replace(family, prepare={**family.prepare, "options": options})
    return model, prepared(family, model, simulated(most_seconds=0.001), ON_CPU, 3, "fp32")


def least_live_bytes(family: Family) -> int:
    """What the error asks for."""
    with pytest.raises(penstock.MemoryBudgetError) as caught:
        with_live_bytes(family, 1)
    found = re.search(r"take ([\d,]+) bytes when gathered", str(caught.value))
    return int(found[1].replace(",", ""))


def assert_released(optimizer: penstock.Optimizer) -> None:
    engine = optimizer._engine
    assert [unit.name for unit in engine.context.units if unit.holding.unit_state is not UnitState.RELEASED] == []
    assert engine.gatherer.live_bytes == 0
    assert optimizer.locations().bytes(kind="gathered") == 0


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_nothing_stays_gathered_and_the_least_budget_is_enough(family):
    least = least_live_bytes(family)
    model, optimizer = with_live_bytes(family, least)
    for step in range(2):
        torch.manual_seed(step)
        family.work(model, Batch(step), optimizer.backward)
        assert_released(optimizer)
        assert not optimizer.step().skipped
        assert_released(optimizer)
        optimizer.zero_grad()
        if family.name in RECORDED:
            continue
        with nullcontext() if family.name in NEEDS_GRAD else torch.no_grad():
            family.work(model, Batch(step), lambda loss, **_: None)
        assert_released(optimizer)
    if family.name not in UNBOUNDED:
        assert optimizer._engine.gatherer.peak_live_bytes <= least
    optimizer.close()
