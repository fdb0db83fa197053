"""Operations are timed for real, as far as they can be."""

import pytest
import torch
from torch import nn

from penstock.planner.simulation import operation_times as measured
from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import fake_tensor
from penstock.planner.simulation.model_copy import copy_model
from penstock.planner.simulation.operation_cost import Recipe
from penstock.planner.simulation.operation_times import time_ops
from penstock.planner.simulation.program import Op


def roofline(op: Op) -> float:
    return 1e-6 + op.flops / 1e11 + op.nbytes / 1e10


@pytest.fixture
def recipes() -> dict[Op, Recipe]:
    model = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50))
    model = copy_model(model)
    with FakeOperations() as mode:
        ids = fake_tensor((4, 8), torch.int64)
        nn.functional.cross_entropy(model(ids).view(-1, 50), ids.view(-1)).backward()
    return mode.recipes


def test_each_kind_of_operation_has_a_time(recipes: dict[Op, Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_LEAST_SECONDS", 1e-5)
    none = [name for name, recipe in recipes.items() if measured._timed(recipe, torch.device("cpu")) is None]
    assert none == []
    state = torch.get_rng_state()
    seconds = time_ops(recipes, roofline)
    assert set(seconds) == set(recipes)
    assert all(0 < value < 1 for value in seconds.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_not_timed_is_in_proportion(recipes: dict[Op, Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {op: 7.0 for op in recipes if op.name == "aten.mm.default"}
    monkeypatch.setattr(measured, "_timed", lambda recipe, _: 7.0 if recipe.func is torch.ops.aten.mm.default else None)
    seconds = time_ops(recipes, lambda op: 2.0)
    assert timed
    assert seconds == dict.fromkeys(recipes, 7.0)
    assert time_ops(recipes, lambda op: 2.0, most_bytes=0) == dict.fromkeys(recipes, 2.0)
    assert time_ops(recipes, lambda op: 2.0, most_seconds=-1.0) == dict.fromkeys(recipes, 2.0)
    nothing = next(iter(recipes))  # has no roofline to be compared with
    monkeypatch.undo()
    assert time_ops({nothing: recipes[nothing]}, lambda op: 0.0) == {nothing: 0.0}


def test_attention_elsewhere_is_that_of_the_cpu_by_another_name() -> None:
    query, key, value = (
        torch.randn(2, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    torch.testing.assert_close(measured._attention(query, key, value, 0.0, True)(), out)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(out, query, key, value, out, lse, 0.0, True)
    call = measured._attention_backward(out, query, key, value, out, lse, 0.0, True, attn_mask=None, scale=None)
    for _ in range(2):
        torch.testing.assert_close(call(), grads)
