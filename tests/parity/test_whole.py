"""Rules over whole parameters: the same bits in every placement, and those of torch's classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import penstock
from penstock.runtime.streams import Streams
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import Movement, shares
from tests.parity.whole import Outcome, different, furthest, plain, train

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")

CPU = Movement(params="cpu", grads="cpu", optimizer="cpu")
NVME = Movement(params="nvme", grads="nvme", optimizer="nvme")
KIB = 1 << 10

PLACES: list[tuple[Callable[[], Streams], Movement]] = [
    (inline, Movement()),
    (separate, Movement()),
    (separate, CPU),
    (separate, Movement(optimizer="cpu")),
    (separate, Movement(optimizer="nvme")),
    (separate, Movement(params="cpu", optimizer=shares(device=0.3, cpu=0.4, nvme=0.3))),
    (separate, CPU.but(whole_updates="home")),
    (separate, CPU.but(tile_bytes=4 * KIB)),
    (separate, CPU.but(persistent_bytes=600)),
    (simulated, NVME),
    (simulated, CPU.but(whole_updates="home")),
    (separate, Movement(0, "cpu", "cpu", "cpu", "none")),
    (separate, Movement(1, "cpu", "cpu", "cpu", "backward")),
    (simulated, Movement(2, "cpu", "cpu", "nvme", "forward")),
]

ARITHMETIC: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "accumulation": 2},
    {"precision": "bf16", "master": "fp32"},
    {"precision": "fp16", "initial_loss_scale": 256.0},
]


def name_of(place: tuple[Callable[[], Streams], Movement]) -> str:
    streams, how = place
    fields = ("stage", "params", "grads", "optimizer", "overlap")
    return f"{streams.__name__} {'-'.join(str(getattr(how, field)) for field in fields)} {dict(how.options)}"


def reference(what: dict[str, Any], **rest: Any) -> Outcome:
    return train(Movement(), **what, **rest)


@pytest.mark.parametrize("what", ARITHMETIC, ids=str)
def test_placement_does_not_change_the_result(what: dict[str, Any]) -> None:
    expected = reference(what)
    failures = []
    for streams, how in PLACES if what == ARITHMETIC[1] else PLACES[::4]:
        if how.overlap == "backward" and (what.get("precision") == "fp16" or what.get("accumulation", 1) > 1):
            continue
        skip = ("norm",) if "persistent_bytes" in dict(how.options) else ()
        found = different(train(how, streams=streams(), **what), expected, skip)
        failures += [f"{name_of((streams, how))}: {', '.join(found)}"] if found else []
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_it_is_what_torch_computes(precision: str, accumulation: int) -> None:
    ours, theirs = (
        train(CPU, precision=precision, accumulation=accumulation),
        plain(precision, accumulation=accumulation),
    )
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6 if accumulation == 1 else 1e-3)
    # Sums of micro-batches in bf16 are rounded as they are; a bit of the momentum is one of the orthogonal matrix.
    assert furthest(ours, theirs) < (1e-6 if accumulation == 1 else 2e-2)


@pytest.mark.parametrize(("state_dtype", "rounding"), [("bf16", "nearest"), ("int8", "stochastic")])
def test_states_in_fewer_bits_are_the_same_in_every_placement(state_dtype: str, rounding: str) -> None:
    options = {"state_dtype": state_dtype, "rounding": rounding}
    expected = train(Movement().but(**options), precision="bf16")
    for how in (CPU, NVME):
        assert different(train(how.but(**options), precision="bf16", streams=separate()), expected) == []
    assert all(torch.isfinite(torch.tensor(loss)) for loss in expected["loss"])


def test_clipping_scales_what_the_momentum_sees() -> None:
    free, clipped = train(CPU), train(CPU, max_grad_norm=1e-3)
    assert different(clipped, train(Movement(), max_grad_norm=1e-3)) == []
    ratio = free["blocks.0.q.weight"][1].norm() / clipped["blocks.0.q.weight"][1].norm()
    assert ratio > 10


def test_state_may_move_between_steps() -> None:
    def move(optimizer: penstock.Optimizer, step: int) -> None:
        optimizer.offload_states(to="nvme" if step % 2 else "cpu")
        optimizer.reload_states()

    for how in (Movement(optimizer="nvme"), NVME):
        assert different(train(how, between=move, streams=separate()), reference({})) == []
