"""add_param_group of a prepared optimizer: what it keeps, what it takes, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import prepare_on
from tests.lib.streams import inline, separate
from tests.parity.rows import Movement, Net, batches, loss_of
from tests.parity.test_unfreezing import make, stock, unfreeze_a_block, unfreeze_a_layer

SMALL = {"tile_bytes": 4 << 10}
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(**SMALL)

Prepared = tuple[Net, penstock.Optimizer]


def prepared(how: Movement = ON_CPU, streams: Any = separate, **rest: Any) -> Prepared:
    model = make()
    options = penstock.Options(**dict(how.options))
    optimizer = prepare_on(streams(), model, stock(model), placement=how.placement, options=options, **rest)
    return model, optimizer


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
    optimizer.close()


def test_gradients_of_others_are_kept_and_stepped_with() -> None:
    seen = []
    for adds in (False, True):
        model, optimizer = prepared(precision="fp32")
        optimizer.backward(loss(model))
        if adds:
            optimizer.add_param_group({"params": unfreeze_a_block(model)})
        norm = optimizer.step().grad_norm
        seen.append([torch.tensor(norm), optimizer.full_param(model.last.weight)])
        optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_skipped_steps_are_counted_on() -> None:
    model, optimizer = prepared()
    for adds in (False, True):
        if adds:
            optimizer.add_param_group({"params": unfreeze_a_block(model)})
        optimizer.backward(loss(model) * torch.nan)
        with pytest.warns(UserWarning, match="was skipped") if not adds else pytest.MonkeyPatch.context():
            assert optimizer.step().skipped
        optimizer.zero_grad()
    assert optimizer._engine.policy.skips.in_a_row == 2
    optimizer.close()


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
    optimizer.close()


def test_what_was_in_a_group_and_never_trained_moves() -> None:
    model = make()
    optimizer = prepare_on(separate(), model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="fp32")
    unfrozen = unfreeze_a_block(model)
    with pytest.raises(penstock.EngineError, match=r"'blocks.1.norm.weight' was frozen.*add_param_group"):
        optimizer.step()
    optimizer.add_param_group({"params": unfrozen, "lr": 1e-3})
    assert not set(unfrozen) & set(optimizer.param_groups[0]["params"])
    before = optimizer.full_param(model.blocks[1].up.weight)
    train(model, optimizer)
    assert not torch.equal(optimizer.full_param(model.blocks[1].up.weight), before)
    optimizer.close()


def test_frozen_again_and_unfrozen_it_goes_on() -> None:
    model, optimizer = prepared()
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    train(model, optimizer)
    model.blocks[1].requires_grad_(False)
    train(model, optimizer, 1)
    model.blocks[1].requires_grad_(True)
    train(model, optimizer, 2)
    assert optimizer.full_state(model.blocks[1].up.weight, "step") == 2
    optimizer.close()


def test_adapters_of_peft_that_come_later() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.arange(24).reshape(2, 12) % 64
    losses = []
    for plain in (True, False):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config)
        for layer in model.model.layers:
            layer.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if not plain:
            optimizer = penstock.prepare(
                model, optimizer, precision="fp32", options=penstock.Options(debug_release=True)
            )
        losses.append([])
        for step in range(6):
            if step == 2:
                torch.manual_seed(2)
                flags = {p: p.requires_grad for p in model.parameters()}
                adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
                for parameter, flag in flags.items():
                    parameter.requires_grad_(flag)
                params = [p for name, p in adapted.named_parameters() if "lora_" in name]
                optimizer.add_param_group({"params": params, "lr": 5e-2})
            made = (adapted if step >= 2 else model)(input_ids=ids, labels=ids).loss
            losses[-1].append(made.item())
            made.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not plain:
            with optimizer.gathered():
                state = peft.get_peft_model_state_dict(adapted)
            assert all(value.isfinite().all() and value.abs().sum() > 0 for value in state.values())
            optimizer.close()
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=0)


# What is refused


def foreign(model: Net) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.zeros(3, 5))]}


def trained_already(model: Net) -> dict[str, Any]:
    return {"params": [model.last.weight]}


def frozen_still(model: Net) -> dict[str, Any]:
    return {"params": model.blocks[1].parameters()}


def of_another_state(model: Net) -> dict[str, Any]:
    return {"params": unfreeze_a_block(model), "amsgrad": True}


def on_meta(model: Net) -> dict[str, Any]:
    model.extra = nn.Linear(2, 2, device="meta")
    return {"params": model.extra.parameters()}


def in_place_of_another(model: Net) -> dict[str, Any]:
    model.last = nn.Linear(32, 4)
    return {"params": model.last.parameters()}


def without_params(model: Net) -> dict[str, Any]:
    return {"params": []}


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (foreign, penstock.ConfigError, r"shape \(3, 5\) is not the model's"),
        (trained_already, ValueError, "more than one parameter group"),
        (frozen_still, penstock.ConfigError, r"asks for a gradient.*requires_grad_\(True\)"),
        (of_another_state, penstock.ConfigError, "max_exp_avg_sq"),
        (on_meta, penstock.ConfigError, r"'extra.weight' \(\(2, 2\)\) has no values"),
        (in_place_of_another, penstock.ConfigError, "'last.weight' is another parameter now"),
        (without_params, penstock.ConfigError, "asks for a gradient"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(
    group: Callable[[Net], dict[str, Any]], error: type[Exception], message: str
) -> None:
    model, optimizer = prepared()
    train(model, optimizer)
    modules = dict(model._modules)
    before = optimizer.locations().to_dict()
    groups = [(dict(each), list(each["params"])) for each in optimizer.param_groups]
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group(model))
    assert [(dict(each), list(each["params"])) for each in optimizer.param_groups] == groups
    assert optimizer.locations().to_dict() == before
    model._modules.clear()
    model._modules.update(modules)
    model.blocks.requires_grad_(False)
    train(model, optimizer, 1)
    optimizer.close()


def test_when_it_cannot_be() -> None:
    model, optimizer = prepared(Movement().but(**SMALL))
    group = {"params": unfreeze_a_block(model)}
    with pytest.raises(penstock.EngineError, match=r"inside gathered\(\)"), optimizer.gathered():
        optimizer.add_param_group(group)
    ema = penstock.EMA(optimizer)
    with pytest.raises(penstock.EngineError, match=r"inside EMA.applied"), ema.applied():
        optimizer.add_param_group(group)
    messages = []

    def inside(*_: Any) -> None:
        with pytest.raises(penstock.EngineError) as caught:
            optimizer.add_param_group(group)
        messages.append(str(caught.value))

    handle = model.last.register_forward_pre_hook(inside)
    with torch.no_grad():
        model.blocks.requires_grad_(False)
        loss(model)
    handle.remove()
    assert "inside a forward" in messages[0]
    model.blocks[1].requires_grad_(True)
    optimizer.offload_states()
    with pytest.raises(penstock.EngineError, match=r"reload_states\(\)"):
        optimizer.add_param_group(group)
    optimizer.reload_states()
    optimizer.add_param_group(group)
    train(model, optimizer)
    optimizer.close()
    with pytest.raises(penstock.EngineError, match=r"after close\(\)"):
        optimizer.add_param_group(group)


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
    optimizer.close()


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


@pytest.mark.parametrize("begin", [lambda model, _: loss(model), of_gathered], ids=["forward", "gathered"])
@pytest.mark.parametrize("make", [inline, separate])
def test_a_graph_from_before_is_refused(make: Callable[[], Any], begin: Callable[..., Tensor]) -> None:
    model, optimizer = prepared(streams=make)
    made = begin(model, optimizer)
    optimizer.add_param_group({"params": unfreeze_a_block(model)})
    with pytest.raises(RuntimeError, match=r"graph from before.*add_param_group\(\)|modified by an inplace operation"):
        optimizer.backward(made)
    optimizer.zero_grad()
    train(model, optimizer)
    optimizer.close()


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
    optimizer.close()


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
