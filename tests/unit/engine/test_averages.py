"""Averages of the parameters: what they are, where they are, what is shown, and what is refused meanwhile."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.ext.ema import Averages
from tests.lib.engines import ON_CPU, assert_same_state, loss_of, prepared, same_bits, train
from tests.lib.models import Blocks, batch_of, opaque_blocks
from tests.lib.refusals import Refusal, refused
from tests.lib.streams import inline, separate


def net(streams: Any = separate, **how: Any) -> tuple[Blocks, penstock.Optimizer]:
    """On the cpu, unless it is told where."""
    return prepared(Blocks, streams, **{"precision": "bf16", **(how or ON_CPU)})


def values(model: nn.Module, optimizer: penstock.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.full_param(p) for name, p in model.named_parameters()}


def averaged(ema: penstock.EMA, model: nn.Module, optimizer: penstock.Optimizer) -> dict[str, Tensor]:
    with ema.applied():
        return values(model, optimizer)


@pytest.mark.parametrize("master", ["remainder", "fp32", "none"])
def test_the_block_shows_the_average_and_gives_every_bit_back(master: str) -> None:
    model, optimizer = net(master=master, **ON_CPU)
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer)
    ema.update()
    before, average = values(model, optimizer), averaged(ema, model, optimizer)
    x = batch_of(model, 1)
    with ema.applied(), torch.no_grad():
        inside = model(x)
        with optimizer.gathered():
            shown = {name: value.clone() for name, value in model.state_dict().items()}
    plain = Blocks().bfloat16()
    plain.load_state_dict(shown)
    assert torch.equal(plain(x.bfloat16()), inside)
    with torch.no_grad():
        assert not torch.equal(model(x), inside)
    for name, value in average.items():
        torch.testing.assert_close(shown[name].float(), value, rtol=1e-2, atol=1e-3)
    assert_same_state(values(model, optimizer), before)
    assert_same_state(averaged(ema, model, optimizer), average)


@pytest.mark.parametrize("records", [False, True])
def test_an_exception_in_the_block_leaves_what_was(records: bool) -> None:
    model, optimizer = net()
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer)
    ema.update()
    before = values(model, optimizer)

    with (
        model.last.register_forward_pre_hook(lambda *_: 1 / 0),
        pytest.raises(ZeroDivisionError),
        ema.applied(),
        torch.set_grad_enabled(records),
    ):
        loss_of(model)
    assert_same_state(values(model, optimizer), before)
    assert not same_bits(averaged(ema, model, optimizer)["first.weight"], before["first.weight"])
    train(model, optimizer, first=1)


def modify(optimizer: penstock.Optimizer) -> None:
    with optimizer.gathered(modify=True):
        pass


def applied_again(ema: penstock.EMA) -> None:
    with ema.applied():
        pass


def test_training_inside_the_block_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = net()
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer)
    optimizer.save(tmp_path / "a")
    ema.update()
    before = values(model, optimizer)
    parameter = model.first.weight
    value = torch.zeros(parameter.shape)
    with ema.applied():
        loss = loss_of(model)
        for name, call in (
            ("backward", lambda: optimizer.backward(loss)),
            ("backward", loss.backward),
            ("step", optimizer.step),
            ("clip_grad_norm_", lambda: optimizer.clip_grad_norm_(1.0)),
            ("save", lambda: optimizer.save(tmp_path / "a")),
            ("load", lambda: optimizer.load(tmp_path / "a")),
            ("gathered", lambda: modify(optimizer)),
            ("set_full_param", lambda: optimizer.set_full_param(parameter, value)),
            ("set_full_state", lambda: optimizer.set_full_state(parameter, "exp_avg", value)),
            ("close", optimizer.close),
            ("EMA.update", ema.update),
            ("EMA.applied", lambda: applied_again(ema)),
            ("EMA", lambda: penstock.EMA(optimizer, name="other")),
        ):
            with pytest.raises(penstock.EngineError, match=rf"{name}\(\) was called inside EMA.applied"):
                call()
    assert_same_state(values(model, optimizer), before)
    for call in (ema.applied, ema.update, lambda: penstock.EMA(optimizer, name="other")):
        with pytest.raises(penstock.EngineError, match=r"inside gathered"), optimizer.gathered():
            call()
    train(model, optimizer, first=1)
    optimizer.close()
    for call in (ema.applied, ema.update):
        with pytest.raises(penstock.EngineError, match=r"after close"):
            call()


@pytest.mark.parametrize("make", [inline, separate])
def test_a_graph_of_the_average_is_of_no_use_after_the_block(make: Callable[[], Any]) -> None:
    model, optimizer = net(make, precision="fp32")
    ema = penstock.EMA(optimizer, decay=0.5)
    with ema.applied():
        loss = loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(loss)
    optimizer.zero_grad()
    train(model, optimizer, first=1)


def test_homes_move_while_the_average_is_there_and_while_it_is_shown() -> None:
    model, optimizer = net(params="device")
    ema = penstock.EMA(optimizer, decay=0.5, tier="cpu")
    train(model, optimizer)
    optimizer.offload_states()
    ema.update()
    before = values(model, optimizer)
    with ema.applied():
        optimizer.reload_states()
    assert_same_state(values(model, optimizer), before)
    train(model, optimizer, first=1)
    ema.update()


@pytest.mark.parametrize(("tier", "make"), [("device", separate), ("cpu", inline), ("nvme", separate)])
def test_every_byte_is_accounted_for(tier: Any, make: Callable[[], Any]) -> None:
    model, optimizer = net(make, params="nvme", optimizer="cpu")
    before = optimizer.locations()
    ema = penstock.EMA(optimizer, tier=tier)
    train(model, optimizer)
    ema.update()
    report = optimizer.locations()
    numel = sum(unit.shard_numel for unit in optimizer._engine.context.units)
    assert report.bytes(kind="ema") == 4 * numel
    report.assert_on("ema", tier)
    assert {row.kind for row in report.rows} == {row.kind for row in before.rows} | {"ema", "staging"}
    assert report.bytes(kind="param") == before.bytes(kind="param")
    engine = optimizer._engine
    optimizer.close()
    assert not list(engine.context.store.table())


def test_several_averages_have_names() -> None:
    model, optimizer = net(inline)
    fast, slow = penstock.EMA(optimizer, 0.1), penstock.EMA(optimizer, 0.9, name="slow", tier="device")
    train(model, optimizer)
    fast.update()
    slow.update()
    shown = [averaged(ema, model, optimizer)["first.weight"] for ema in (fast, slow)]
    assert not torch.equal(*shown)
    assert optimizer.locations().bytes(kind="ema.slow") == optimizer.locations().bytes(kind="ema") > 0


def test_what_is_frozen_is_not_averaged() -> None:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    _, optimizer = prepared(model, inline)
    ema = penstock.EMA(optimizer, 0.5)
    assert {row.unit for row in optimizer.locations().rows if row.kind == "ema"} == {"root", "blocks.1"}
    before = [optimizer.full_param(p) for p in model.blocks[0].parameters()]
    train(model, optimizer)
    ema.update()
    with ema.applied():
        assert all(map(torch.equal, map(optimizer.full_param, model.blocks[0].parameters()), before))


REFUSED = {
    "decay": Refusal(lambda ema, _: setattr(ema, "decay", 1.5), "decay=1.5"),
    "of 2": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, decay=2), "decay=2"),
    "of True": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, decay=True), "decay=True"),
    "of text": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, decay="0.9"), "decay='0.9'"),
    "tier": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, tier="moon"), "tier='moon'"),
    "no folder": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, tier="nvme", name="b"), "nvme_path"),
    "name": Refusal(lambda ema, optimizer: penstock.EMA(optimizer, name="a b"), "name='a b'"),
    "name taken": Refusal(lambda ema, optimizer: penstock.EMA(optimizer), "average 'ema' already"),
    "torch's optimizer": Refusal(lambda *_: penstock.EMA(torch.optim.SGD([torch.ones(1)], lr=1.0)), "prepare"),
}


def test_what_cannot_be_is_refused_and_nothing_has_changed() -> None:
    model, optimizer = net(inline)
    ema = penstock.EMA(optimizer)
    before = optimizer.locations().to_dict()
    for row in REFUSED.values():
        refused(row, ema, optimizer)
        assert optimizer.locations().to_dict() == before
    train(model, optimizer)
    ema.update()


def test_memory_that_is_not_there_leaves_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = net()
    before = optimizer.locations().to_dict()

    def fail(*_: Any, **__: Any) -> None:
        raise penstock.MemoryBudgetError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(Averages, "make_room", fail)
        with pytest.raises(penstock.MemoryBudgetError):
            penstock.EMA(optimizer)
    assert optimizer.locations().to_dict() == before
    train(model, optimizer)
    penstock.EMA(optimizer).update()


def test_a_forward_that_waits_for_its_backward_is_named() -> None:
    """Of a block with an output that cannot be looked into: it stays gathered until its backward."""
    model, optimizer = prepared(opaque_blocks())
    ema = penstock.EMA(optimizer, 0.5)
    loss = loss_of(model)
    with pytest.raises(penstock.EngineError, match=r"'blocks\.1' is in use by a forward"):
        ema.applied()
    optimizer.backward(loss)
    optimizer.step()
    before = values(model, optimizer)
    with ema.applied():
        loss_of(model)  # recorded, and its backward never comes
    assert_same_state(values(model, optimizer), before)


# Checkpoints


def test_a_checkpoint_without_it_begins_with_the_parameters_and_one_that_is_not_asked_for_is_left_and_both_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = net(inline)
    optimizer.save(tmp_path / "without")
    ema = penstock.EMA(optimizer, 0.5)
    optimizer.save(tmp_path / "with")
    before = values(model, optimizer)
    train(model, optimizer, first=1)
    ema.update()
    with caplog.at_level(logging.WARNING, "penstock"):
        optimizer.load(tmp_path / "without")
    assert "has no average 'ema': it begins with the parameters" in caplog.text
    assert_same_state(averaged(ema, model, optimizer), values(model, optimizer))
    optimizer.close()
    model, optimizer = net(inline)
    train(model, optimizer)
    with caplog.at_level(logging.WARNING, "penstock"):
        optimizer.load(tmp_path / "with")
    assert "has an average 'ema', which is not loaded" in caplog.text
    assert_same_state(values(model, optimizer), before)
