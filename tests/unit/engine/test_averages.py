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
from tests.lib.engines import prepared as prepare
from tests.lib.refusals import Refusal, refused
from tests.lib.streams import inline, separate
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared

BF16 = Arithmetic(precision="bf16")
SMALL = {"tile_bytes": 4 << 10}
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(**SMALL)


def train(model: nn.Module, optimizer: penstock.Optimizer, step: int) -> None:
    optimizer.backward(loss_of(model, batches(1, 1)[step][0][0]))
    optimizer.step()
    optimizer.zero_grad()


def all_of(model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    return [optimizer.full_param(p) for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def averaged(ema: penstock.EMA, model: nn.Module, optimizer: penstock.Optimizer) -> list[Tensor]:
    with ema.applied():
        return all_of(model, optimizer)


def test_decay_is_written_between_updates() -> None:
    model, optimizer = prepared(BF16, ON_CPU)
    ema = penstock.EMA(optimizer)
    wanted = all_of(model, optimizer)
    for step, decay in enumerate((0.1, 0.5, 0.9)):
        train(model, optimizer, step)
        ema.decay = decay
        ema.update()
        torch._foreach_lerp_(wanted, all_of(model, optimizer), 1 - decay)
    for ours, theirs in zip(averaged(ema, model, optimizer), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    optimizer.close()


@pytest.mark.parametrize("master", ["remainder", "fp32", "none"])
def test_the_block_shows_the_average_and_gives_every_bit_back(master: str) -> None:
    model, optimizer = prepared(Arithmetic(precision="bf16", master=master), ON_CPU, separate())
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer, 0)
    ema.update()
    before, average = all_of(model, optimizer), averaged(ema, model, optimizer)
    x = batches(1, 1)[1][0][0][0]
    with ema.applied(), torch.no_grad():
        inside = model(x)
        with optimizer.gathered():
            state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = make_model().bfloat16()
    plain.load_state_dict(state)
    assert torch.equal(plain(x.bfloat16()), inside)
    with torch.no_grad():
        assert not torch.equal(model(x), inside)
    for shown, value in zip(state.values(), average, strict=True):
        torch.testing.assert_close(shown.float(), value, rtol=1e-2, atol=1e-3)
    assert same(all_of(model, optimizer), before)
    assert same(averaged(ema, model, optimizer), average)
    optimizer.close()


class OwnError(Exception):
    pass


@pytest.mark.parametrize("records", [False, True])
def test_an_exception_in_the_block_leaves_what_was(records: bool) -> None:
    model, optimizer = prepared(BF16, ON_CPU, separate())
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer, 0)
    ema.update()
    before = all_of(model, optimizer)

    def fail(*_: Any) -> None:
        raise OwnError

    handle = model.last.register_forward_pre_hook(fail)
    with pytest.raises(OwnError), ema.applied(), torch.set_grad_enabled(records):
        model(batches(1, 1)[1][0][0][0])
    handle.remove()
    assert same(all_of(model, optimizer), before)
    assert not same(averaged(ema, model, optimizer), before)
    train(model, optimizer, 1)
    optimizer.close()


def modify(optimizer: penstock.Optimizer) -> None:
    with optimizer.gathered(modify=True):
        pass


def applied_again(ema: penstock.EMA) -> None:
    with ema.applied():
        pass


def test_training_inside_the_block_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = prepared(BF16, ON_CPU, separate())
    ema = penstock.EMA(optimizer, decay=0.5)
    train(model, optimizer, 0)
    optimizer.save(tmp_path / "a")
    ema.update()
    before = all_of(model, optimizer)
    parameter = model.first.weight
    value = torch.zeros(parameter.shape)
    with ema.applied():
        loss = loss_of(model, batches(1, 1)[1][0][0])
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
    assert same(all_of(model, optimizer), before)
    for call in (ema.applied, ema.update, lambda: penstock.EMA(optimizer, name="other")):
        with pytest.raises(penstock.EngineError, match=r"inside gathered"), optimizer.gathered():
            call()
    train(model, optimizer, 1)
    optimizer.close()
    for call in (ema.applied, ema.update):
        with pytest.raises(penstock.EngineError, match=r"after close"):
            call()


@pytest.mark.parametrize("make", [inline, separate])
def test_a_graph_of_the_average_is_of_no_use_after_the_block(make: Callable[[], Any]) -> None:
    model, optimizer = prepared(Arithmetic(), Movement(), make())
    ema = penstock.EMA(optimizer, decay=0.5)
    with ema.applied():
        loss = loss_of(model, batches(1, 1)[1][0][0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(loss)
    optimizer.zero_grad()
    train(model, optimizer, 1)
    optimizer.close()


def test_homes_move_while_the_average_is_there_and_while_it_is_shown() -> None:
    model, optimizer = prepared(BF16, Movement().but(**SMALL), separate())
    ema = penstock.EMA(optimizer, decay=0.5, tier="cpu")
    train(model, optimizer, 0)
    optimizer.offload_states()
    ema.update()
    before = all_of(model, optimizer)
    with ema.applied():
        optimizer.reload_states()
    assert same(all_of(model, optimizer), before)
    train(model, optimizer, 1)
    ema.update()
    optimizer.close()


@pytest.mark.parametrize(("tier", "make"), [("device", separate), ("cpu", inline), ("nvme", separate)])
def test_every_byte_is_accounted_for(tier: Any, make: Callable[[], Any]) -> None:
    how = Movement(params="nvme", optimizer="cpu").but(**SMALL)
    model, optimizer = prepared(BF16, how, make())
    before = optimizer.locations()
    ema = penstock.EMA(optimizer, tier=tier)
    train(model, optimizer, 0)
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
    model, optimizer = prepared(BF16, ON_CPU)
    fast, slow = penstock.EMA(optimizer, 0.1), penstock.EMA(optimizer, 0.9, name="slow", tier="device")
    train(model, optimizer, 0)
    fast.update()
    slow.update()
    assert not same(averaged(fast, model, optimizer), averaged(slow, model, optimizer))
    assert optimizer.locations().bytes(kind="ema.slow") == optimizer.locations().bytes(kind="ema") > 0
    optimizer.close()


def test_what_is_frozen_is_not_averaged() -> None:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    _, optimizer = prepare(model, inline)
    ema = penstock.EMA(optimizer, 0.5)
    assert {row.unit for row in optimizer.locations().rows if row.kind == "ema"} == {"root", "blocks.1"}
    before = [optimizer.full_param(p) for p in model.blocks[0].parameters()]
    train(model, optimizer, 0)
    ema.update()
    with ema.applied():
        assert same([optimizer.full_param(p) for p in model.blocks[0].parameters()], before)
    optimizer.close()


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
    model, optimizer = prepared(BF16, ON_CPU)
    ema = penstock.EMA(optimizer)
    before = optimizer.locations().to_dict()
    for row in REFUSED.values():
        refused(row, ema, optimizer)
        assert optimizer.locations().to_dict() == before
    train(model, optimizer, 0)
    ema.update()
    optimizer.close()


def test_memory_that_is_not_there_leaves_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(BF16, ON_CPU, separate())
    before = optimizer.locations().to_dict()

    def fail(*_: Any, **__: Any) -> None:
        raise penstock.MemoryBudgetError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(Averages, "make_room", fail)
        with pytest.raises(penstock.MemoryBudgetError):
            penstock.EMA(optimizer)
    assert optimizer.locations().to_dict() == before
    train(model, optimizer, 0)
    penstock.EMA(optimizer).update()
    optimizer.close()


class Opaque:
    """An output that cannot be looked into: its unit stays gathered until its backward."""

    __slots__ = ("_get",)

    def __init__(self, value: Tensor) -> None:
        self._get = lambda: value


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hiding(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)._get()
        return x.sum()


def test_a_forward_that_waits_for_its_backward_is_named() -> None:
    model, optimizer = prepare(Sum())
    ema = penstock.EMA(optimizer, 0.5)
    loss = model(torch.ones(2, 4))
    with pytest.raises(penstock.EngineError, match=r"'blocks\.0' is in use by a forward"):
        ema.applied()
    optimizer.backward(loss)
    optimizer.step()
    before = all_of(model, optimizer)
    with ema.applied():
        model(torch.ones(2, 4))  # recorded, and its backward never comes
    assert same(all_of(model, optimizer), before)
    optimizer.close()


# Checkpoints


def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    model, optimizer = prepared(BF16, ON_CPU, separate())
    ema = penstock.EMA(optimizer, 0.5)
    for step in range(2):
        train(model, optimizer, step)
        ema.update()
    optimizer.save(tmp_path / "a", blocking=False)
    train(model, optimizer, 2)
    ema.update()
    goes_on = averaged(ema, model, optimizer)
    optimizer.close()
    for how, tier in ((Movement(), "device"), (Movement(optimizer="nvme").but(tile_bytes=8 << 10), "nvme")):
        model, optimizer = prepared(BF16, how)
        ema = penstock.EMA(optimizer, 0.5, tier=tier)
        optimizer.load(tmp_path / "a")
        train(model, optimizer, 2)
        ema.update()
        assert same(averaged(ema, model, optimizer), goes_on)
        optimizer.close()


def test_a_checkpoint_without_it_begins_with_the_parameters_and_one_that_is_not_asked_for_is_left_and_both_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = prepared(BF16, ON_CPU)
    optimizer.save(tmp_path / "without")
    ema = penstock.EMA(optimizer, 0.5)
    optimizer.save(tmp_path / "with")
    before = all_of(model, optimizer)
    train(model, optimizer, 1)
    ema.update()
    with caplog.at_level(logging.WARNING, "penstock"):
        optimizer.load(tmp_path / "without")
    assert "has no average 'ema': it begins with the parameters" in caplog.text
    assert same(averaged(ema, model, optimizer), all_of(model, optimizer))
    optimizer.close()
    model, optimizer = prepared(BF16, ON_CPU)
    train(model, optimizer, 0)
    with caplog.at_level(logging.WARNING, "penstock"):
        optimizer.load(tmp_path / "with")
    assert "has an average 'ema', which is not loaded" in caplog.text
    assert same(all_of(model, optimizer), before)
    optimizer.close()
