"""add_param_group of a prepared optimizer: what it keeps, what it takes, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_CPU, adamw
from tests.lib.engines import prepared as prepare
from tests.lib.refusals import Refusal, refused
from tests.lib.streams import inline, separate
from tests.parity.rows import Net, batches, loss_of
from tests.parity.test_unfreezing import make, unfreeze_a_block, unfreeze_a_layer

Prepared = tuple[Net, penstock.Optimizer]


def prepared(**how: Any) -> Prepared:
    """In bf16, with everything on the cpu."""
    return prepare(make(), stock=adamw, **{"precision": "bf16", **ON_CPU, **how})


def loss(model: Net, step: int = 0) -> Tensor:
    return loss_of(model, batches(1, 1)[step][0][0])


def train(model: Net, optimizer: penstock.Optimizer, step: int = 0) -> None:
    optimizer.backward(loss(model, step))
    optimizer.step()
    optimizer.zero_grad()


def test_groups_are_torchs_and_schedulers_keep_working() -> None:
    model, optimizer = prepared()
    group, handle, backward = optimizer.param_groups[0], optimizer, optimizer.backward
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer)
    optimizer.add_param_group({"params": unfreeze_a_block(model), "lr": 0.25})
    assert optimizer.param_groups[0] is group
    assert handle.backward == backward
    added = optimizer.param_groups[1]
    assert (added["lr"], added["betas"], added["weight_decay"]) == (0.25, (0.9, 0.999), group["weight_decay"])
    assert added["params"] == list(model.blocks[1].parameters())
    train(model, optimizer, 1)
    scheduler.step()
    assert (added["lr"], group["lr"]) == (0.125, 0.005)
    state = optimizer.state_dict()
    assert len(state["param_groups"]) == 2
    assert len(state["state"]) == len(group["params"]) + len(added["params"])
    optimizer.load_state_dict(state)
    model.zero_grad()
    optimizer.close()
    assert "zero_grad" not in vars(model)


def test_what_is_there_stays_and_what_comes_is_accounted_for() -> None:
    model, optimizer = prepared()
    train(model, optimizer)
    last = model.last.weight
    before = {name: optimizer.full_state(last, name) for name in ("step", "exp_avg", "exp_avg_sq")}
    exact, base = optimizer.full_param(last), optimizer.full_param(model.blocks[1].up.weight)
    units = {unit.name: unit for unit in optimizer._engine.context.units}
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    optimizer.add_param_group({"params": unfreeze_a_layer(model)})
    assert torch.equal(optimizer.full_param(last), exact)
    assert torch.equal(optimizer.full_param(model.blocks[1].up.weight), base)
    for name, value in before.items():
        assert torch.equal(optimizer.full_state(last, name), value)
    after = {unit.name: unit for unit in optimizer._engine.context.units}
    assert list(after) == ["root.frozen", "root", "blocks.0", "blocks.0.frozen", "blocks.1"]
    assert after["root"] is units["root"]
    assert after["blocks.1"] is units["blocks.1.frozen"]
    report = optimizer.locations()
    assert {row.unit for row in report.rows if row.kind == "param"} == set(after)
    assert {row.unit for row in report.rows if row.kind == "exp_avg"} == {"root", "blocks.0", "blocks.1"}
    numel = {name: unit.shard_numel for name, unit in after.items()}
    for name in ("root", "blocks.0", "blocks.1"):
        assert report.bytes(kind="exp_avg", unit=name) == 4 * numel[name]
        assert report.bytes(kind="master", unit=name) == 2 * numel[name]
    assert optimizer.full_state(model.blocks[0].up.weight, "step") == 0
    train(model, optimizer, 1)
    assert optimizer.full_state(model.blocks[0].up.weight, "step") == 1
    assert optimizer.full_state(last, "step") == 2
    store = optimizer._engine.context.store
    optimizer.close()
    assert not list(store.table())
    assert model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].up.weight.shape == (64, 32)


def test_averages_of_what_comes_begin_with_it() -> None:
    model, optimizer = prepared()
    ema = penstock.EMA(optimizer, 0.5)
    train(model, optimizer)
    ema.update()
    with ema.applied():
        before = optimizer.full_param(model.last.weight)
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    optimizer.add_param_group({"params": unfreeze_a_layer(model)})
    with ema.applied():
        assert torch.equal(optimizer.full_param(model.last.weight), before)
        found = [optimizer.full_param(p) for p in (model.blocks[1].up.weight, model.blocks[0].up.weight)]
    wanted = [optimizer.full_param(p) for p in (model.blocks[1].up.weight, model.blocks[0].up.weight)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert {row.unit for row in optimizer.locations().rows if row.kind == "ema"} == {"root", "blocks.0", "blocks.1"}
    train(model, optimizer, 1)
    ema.update()


def test_the_loss_scale_goes_on() -> None:
    model, optimizer = prepared(precision="fp16")
    optimizer.backward(loss(model) * 1e30)
    assert optimizer.step().skipped
    optimizer.zero_grad()
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    optimizer.backward(loss(model))
    result = optimizer.step()
    assert result.loss_scale == 32768.0
    assert not result.skipped


def test_what_was_in_a_group_and_never_trained_moves() -> None:
    model = make()
    _, optimizer = prepare(model, stock=lambda _: torch.optim.AdamW(model.parameters(), lr=1e-2))
    unfrozen = unfreeze_a_block(model)
    with pytest.raises(penstock.EngineError, match=r"'blocks.1.norm.weight' was frozen.*add_param_group"):
        optimizer.step()
    optimizer.add_param_group({"params": unfrozen, "lr": 1e-3})
    assert not set(unfrozen) & set(optimizer.param_groups[0]["params"])
    before = optimizer.full_param(model.blocks[1].up.weight)
    train(model, optimizer)
    assert not torch.equal(optimizer.full_param(model.blocks[1].up.weight), before)


# What is refused


def on_meta(model: Net) -> Any:
    model.extra = nn.Linear(2, 2, device="meta")
    return model.extra.parameters()


def in_place_of_another(model: Net) -> Any:
    model.last = nn.Linear(32, 4)
    return model.last.parameters()


def add(params: Callable[[Net], Any], text: str, error: type[Exception] = penstock.ConfigError, **rest: Any) -> Refusal:
    return Refusal(lambda model, optimizer: optimizer.add_param_group({"params": params(model), **rest}), text, error)


REFUSED = {
    "trained already": add(lambda model: [model.last.weight], "more than one parameter group", ValueError),
    "frozen still": add(lambda model: model.blocks[1].parameters(), "asks for a gradient"),
    "of another state": add(unfreeze_a_block, "max_exp_avg_sq", amsgrad=True),
    "on meta": add(on_meta, "'extra.weight' ((2, 2)) has no values"),
    "in place of another": add(in_place_of_another, "'last.weight' is another parameter now"),
    "without params": add(lambda model: [], "asks for a gradient"),
}


def test_what_cannot_be_is_refused_and_nothing_has_changed() -> None:
    model, optimizer = prepared()
    train(model, optimizer)
    modules = dict(model._modules)
    before = optimizer.locations().to_dict()
    groups = [(dict(each), list(each["params"])) for each in optimizer.param_groups]
    for step, row in enumerate(REFUSED.values()):
        refused(row, model, optimizer)
        assert [(dict(each), list(each["params"])) for each in optimizer.param_groups] == groups
        assert optimizer.locations().to_dict() == before
        model._modules.clear()
        model._modules.update(modules)
        model.blocks.requires_grad_(False)
        train(model, optimizer, 1 + step)


def test_when_it_cannot_be() -> None:
    model, optimizer = prepared(params="device", grads="device", optimizer="device")
    group = {"params": unfreeze_a_block(model)}
    with pytest.raises(penstock.EngineError, match=r"inside gathered\(\)"), optimizer.gathered():
        optimizer.add_param_group(group)
    ema = penstock.EMA(optimizer)
    with pytest.raises(penstock.EngineError, match=r"inside EMA.applied"), ema.applied():
        optimizer.add_param_group(group)
    optimizer.offload_states()
    with pytest.raises(penstock.EngineError, match=r"reload_states\(\)"):
        optimizer.add_param_group(group)
    optimizer.reload_states()
    optimizer.add_param_group(group)
    train(model, optimizer)


def test_memory_that_is_not_there_leaves_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared()
    train(model, optimizer)
    before = optimizer.locations().to_dict()

    def fail(*_: Any, **__: Any) -> None:
        raise penstock.MemoryBudgetError("none left")

    group = {"params": unfreeze_a_block(model)}
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._engine.context.store, "reserve", fail)
        with pytest.raises(penstock.MemoryBudgetError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert optimizer.locations().to_dict() == before
    optimizer.add_param_group(group)
    train(model, optimizer)


def test_what_fails_in_the_middle_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared()
    train(model, optimizer)
    engine = optimizer._engine

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.build.fill_unit", fail)
        with pytest.raises(OSError, match="gone"):
            optimizer.add_param_group({"params": unfreeze_a_layer(model)})
    assert not list(engine.context.store.table())
    assert all(p.numel() == 0 for p in model.parameters())
    with pytest.raises(penstock.EngineError, match=r"after close\(\)"):
        optimizer.step()


def of_gathered(model: Net, optimizer: penstock.Optimizer) -> Tensor:
    with optimizer.gathered():
        return model.last.weight.square().sum()


@pytest.mark.parametrize(
    ("made_of", "begin"), [(inline, lambda model, _: loss(model)), (separate, of_gathered)], ids=["forward", "gathered"]
)
def test_a_graph_from_before_is_refused(made_of: Callable[[], Any], begin: Callable[..., Tensor]) -> None:
    model, optimizer = prepared(streams=made_of)
    made = begin(model, optimizer)
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    with pytest.raises(RuntimeError, match=r"graph from before.*add_param_group\(\)|modified by an inplace operation"):
        optimizer.backward(made)
    optimizer.zero_grad()
    train(model, optimizer)


def test_a_backward_that_failed_is_not_forgotten() -> None:
    model, optimizer = prepared()
    handle = model.last.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(loss(model))
    handle.remove()
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    with pytest.raises(penstock.EngineError, match="last backward did not finish"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)


def test_gradients_that_were_clipped_and_set_stay_so() -> None:
    """What torch's own functions and people did to `.grad` before counts afterwards, and can go on."""
    results = []
    for adds in (False, True):
        model, optimizer = prepared()
        optimizer.backward(loss(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.last.weight.grad = torch.full_like(model.last.weight, 0.125)
        if adds:
            optimizer.add_param_group({"params": unfreeze_a_block(model)})
        assert model.last.weight.grad is not None
        assert model.blocks[1].up.weight.grad is None
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        gradients = {name: optimizer.full_grad(p) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
        results.append((float(norm), gradients, values))
        optimizer.close()
        assert all(p.grad is None for p in model.parameters())
    (norm, gradients, values), (other_norm, other_gradients, other_values) = results
    assert norm == pytest.approx(other_norm, rel=1e-3)  # what was set is rounded to bf16 once it is looked at
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradient, other_gradients[name]) for name, gradient in gradients.items())
    assert all(torch.equal(value, other_values[name]) for name, value in values.items())
