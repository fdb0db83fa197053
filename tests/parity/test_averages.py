"""Averages of the parameters: the same bits in every placement, on every tier, at every stage and world size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.runtime.streams import Streams
from tests.lib.streams import inline, released, separate, simulated
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, prepared, shares
from tests.support import run_ranks, thorough

DECAY = 0.9
STEPS = 3
SMALL = {"tile_bytes": 4 << 10}
THIRDS = shares(device=0.3, cpu=0.4, nvme=0.3)
FORMS = [
    Arithmetic(),
    Arithmetic(precision="bf16", clip=0.5),
    Arithmetic(precision="bf16", master="fp32"),
    Arithmetic(precision="bf16", master="none"),
]


def late() -> Streams:
    return simulated(most_seconds=0.0005)


MOVEMENTS = [
    (separate, Movement(), "cpu"),
    (late, Movement(overlap="none"), "device"),
    (separate, Movement(params="cpu", grads="cpu", optimizer="cpu"), "device"),
    (late, Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward"), "cpu"),
    (late, Movement(optimizer="cpu", overlap="forward"), "device"),
    (released, Movement(optimizer="cpu"), "cpu"),
    (late, Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward"), "nvme"),
    (separate, Movement(optimizer="nvme"), "device"),
    (late, Movement(params=THIRDS, grads=THIRDS, optimizer=THIRDS), "cpu"),
]


def run(what: Arithmetic, how: Movement, streams: Streams, tier: Any) -> list[list[Tensor]]:
    """The average, the parameters, and what the model computes with the average."""
    model, optimizer = prepared(what, how.but(**SMALL), streams)
    ema = penstock.EMA(optimizer, DECAY, tier=tier)
    for (batch,), *_ in batches(1, 1)[:STEPS]:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    with ema.applied():
        average = [optimizer.full_param(p) for p in model.parameters()]
        with torch.no_grad():
            inside = [model(batches(1, 1)[0][0][0][0])]
    params = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return [average, params, inside]


def plain(what: Arithmetic) -> list[Tensor]:
    """The average by torch, of the masters."""
    model, optimizer = prepared(what, Movement())
    average = [optimizer.full_param(p) for p in model.parameters()]
    for (batch,), *_ in batches(1, 1)[:STEPS]:
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [optimizer.full_param(p) for p in model.parameters()], 1 - DECAY)
    optimizer.close()
    return average


@pytest.mark.parametrize("what", FORMS, ids=changed)
def test_the_same_bits_in_every_placement_as_torch_has(what: Arithmetic) -> None:
    reference = run(what, Movement(), inline(), "device")
    wanted = plain(what)
    if what.master == "none":  # as it is shown: rounded, halfway away from zero
        wanted = [((t.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16).float() for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(reference[0], wanted, strict=True))
    rows = MOVEMENTS if what.precision == "bf16" and what.clip else MOVEMENTS[:: len(FORMS) - 1]
    for streams, how, tier in rows:
        found = run(what, how, streams(), tier)
        for ours, theirs in zip(found, reference, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (changed(how), tier)


# Ranks


def trained_on(
    rank: int, world_size: int, what: Arithmetic, how: Movement, tier: Any, folder: str, load: bool
) -> list[list[float]]:
    model, optimizer = prepared(what, how.but(**SMALL), separate())
    ema = penstock.EMA(optimizer, DECAY, tier=tier)
    if load:
        optimizer.load(folder)
    for (batch, *_), *_ in batches(1, 1)[load : load + 1]:  # the same batch on every rank
        optimizer.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    if not load:
        optimizer.save(folder)
    with ema.applied():
        with torch.no_grad():
            inside = model(batches(1, 1)[0][0][0][0])
        average = [optimizer.full_param(p) for p in model.parameters()]
    with torch.no_grad():
        after = model(batches(1, 1)[0][0][0][0])
    optimizer.close()
    return [tensor.flatten().tolist() for tensor in (*average, inside, after)]


@pytest.mark.parametrize(
    ("stage", "tier"), [(1, "cpu"), (3, "nvme"), thorough(0, "cpu"), thorough(2, "device"), thorough(3, "device")]
)
def test_two_ranks_have_the_average_of_one_and_resume_at_another_world_size(
    stage: int, tier: str, tmp_path: Path
) -> None:
    how = Movement(stage=stage, params="cpu", grads="cpu", optimizer="nvme" if tier == "nvme" else "cpu")
    what, folder = Arithmetic(precision="bf16"), str(tmp_path / "a")
    one = trained_on(0, 1, what, how, tier, folder, False)
    first, second = run_ranks(trained_on, 2, 2, what, how, tier, str(tmp_path / "b"), False)
    assert first == second == one
    goes_on = trained_on(0, 1, what, Movement(), "device", folder, True)
    for saved in ("a", "b"):
        first, second = run_ranks(trained_on, 2, 2, what, how, tier, str(tmp_path / saved), True)
        assert first == second == goes_on
    assert trained_on(0, 1, what, Movement(), "cpu", str(tmp_path / "b"), True) == goes_on


def with_other_decays(rank: int) -> list[str]:
    _, optimizer = prepared(Arithmetic(), Movement())
    ema = penstock.EMA(optimizer)
    ema.decay = 0.1 + rank / 10
    messages = []
    for call in (ema.update, lambda: penstock.EMA(optimizer, name=f"of{rank}")):
        with pytest.raises(penstock.PenstockError) as caught:
            call()
        messages.append(str(caught.value))
    ema.decay = 0.5
    ema.update()
    optimizer.close()
    return messages


def test_ranks_that_average_otherwise_are_told() -> None:
    for messages in run_ranks(with_other_decays, 2):
        assert "decay" in messages[0]
        assert "name" in messages[1]
