"""Norms of gradients that rest on the device: taken when they are asked for, once, of all parts together."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.engine.gradients import reduce
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.step import step
from penstock.errors import EngineError
from penstock.rules.formats import Ranges
from penstock.runtime.streams import Streams
from tests.lib.engines import ON_NVME
from tests.lib.engines import loss_of as loss_of_batch
from tests.lib.engines import prepared as measured
from tests.lib.models import stack
from tests.lib.streams import inline, separate, simulated
from tests.parity.rows import CORE, Arithmetic, Movement, batches, loss_of, prepared, train

WIDTH = 16
EVERY = [inline, separate, simulated]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cpu measures as a device does: late. How many parts were measured together, each time."""
    counts: list[int] = []
    init, of = Reducer.__init__, step.squared_norms_of

    def made(self: Reducer, *given: Any, **rest: Any) -> None:
        init(self, *given, **rest)
        self._measures_late = True

    def note(values: Any) -> Any:
        counts.extend([len(values)] if values else [])
        return of(values)

    monkeypatch.setattr(Reducer, "__init__", made)
    monkeypatch.setattr(step, "squared_norms_of", note)
    return counts


def small(streams: Any = separate, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    return measured(stack, streams, **how)


@pytest.mark.parametrize(
    ("what", "streams"),
    [
        *((what, EVERY[number % 3]) for number, what in enumerate(CORE[::3])),
        (Arithmetic(precision="bf16", accumulation=4, no_sync=True), simulated),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_norms_taken_late_have_the_same_bits(
    what: Arithmetic, streams: Callable[[], Streams], request: pytest.FixtureRequest
) -> None:
    expected = train(what, Movement(), streams=inline(), steps=3)
    counts = request.getfixturevalue("late")
    found = train(what, Movement(), streams=streams(), steps=3)
    assert found.norms == expected.norms
    assert found.losses == expected.losses
    assert counts == [len(expected.final["param"])] * 3, "once a step, whatever was accumulated"


def test_a_parameter_that_gets_two_gradients_in_a_backward_is_measured_as_their_sum(late: list[int]) -> None:
    model, optimizer = small()
    optimizer.backward(loss_of_batch(model) + loss_of_batch(model))
    twice = optimizer.step().grad_norm
    optimizer.close()
    model, optimizer = small()
    optimizer.backward(loss_of_batch(model))
    assert twice == pytest.approx(2 * optimizer.step().grad_norm, rel=1e-6)


def test_what_was_set_by_hand_is_not_measured_again(late: list[int]) -> None:
    model, optimizer = small()
    optimizer.backward(loss_of_batch(model))
    for p in model.parameters():
        optimizer.set_full_grad(p, torch.zeros_like(optimizer.full_grad(p)))
    weight = model[0].weight
    optimizer.set_full_grad(weight, torch.full((WIDTH, WIDTH), 0.5))
    assert optimizer.step().grad_norm == 0.5 * WIDTH
    assert late == []


def test_a_gradient_that_moves_is_measured_before(late: list[int]) -> None:
    model, optimizer = small()
    optimizer.backward(loss_of_batch(model))
    optimizer.offload_states()
    assert late == [6]
    optimizer.reload_states()
    moved = optimizer.step().grad_norm
    assert late == [6]
    optimizer.close()
    model, optimizer = small()
    optimizer.backward(loss_of_batch(model))
    assert optimizer.step().grad_norm == moved


@pytest.mark.parametrize("streams", EVERY)
def test_updates_that_begin_in_backward_know_whether_it_is_finite(
    late: list[int], streams: Callable[[], Streams]
) -> None:
    """The first gradient is, the next one is not: what was updated by then cannot be taken back."""
    how = Movement(3, "cpu", "device", "cpu", "backward")
    model, optimizer = prepared(Arithmetic(), how, streams())
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    optimizer.step()
    optimizer.zero_grad()
    for unit in optimizer._engine.context.units:
        if unit.name == "blocks.0":
            unit.spec.parameters[0].register_hook(lambda grad: grad * math.nan)
    optimizer.backward(loss_of(model, batches(1, 1)[1][0][0]))
    with pytest.raises(EngineError, match="not finite"):
        optimizer.step()
    storages = [unit.params for unit in optimizer._engine.context.units]
    assert all(
        values.isfinite().all() for storage in storages for segment in storage.segments for values in segment.tensors
    )
    with suppress(EngineError):
        optimizer.close(keep_params=False)


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts were measured by a pass of their own, each time."""
    counts: list[int] = []
    measure = reduce.squared_norms

    def noted(values: torch.Tensor, parts: Ranges, **rest: Any) -> Any:
        counts.append(len(parts))
        return measure(values, parts, **rest)

    monkeypatch.setattr(reduce, "squared_norms", noted)
    return counts


def in_files(**rest: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    return small(inline, **ON_NVME, **rest)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_goes_to_a_file_is_measured_by_the_pass_that_collects_it(
    precision: str, read_again: list[int]
) -> None:
    found = []
    for model, optimizer in (in_files(precision=precision), small(inline, precision=precision)):
        optimizer.backward(loss_of_batch(model))
        found.append(optimizer.step().grad_norm)
    assert found[0] == found[1]
    assert read_again == []


def test_a_unit_of_which_not_all_has_a_gradient_is_measured_as_a_whole(read_again: list[int]) -> None:
    model, optimizer = in_files(units=[nn.Sequential])
    optimizer.backward(model[2](model[0](torch.ones(2, WIDTH))).square().mean())
    unused = optimizer.full_grad(model[1].weight)
    assert not unused.any()
    assert optimizer.step().grad_norm > 0
    assert len(read_again) == 1


def test_gradients_that_are_summed_in_more_bits_than_they_come_in_are_measured_at_home(read_again: list[int]) -> None:
    found = []
    for make in (in_files, lambda **rest: small(inline, **rest)):
        model, optimizer = make(precision="bf16", grad_accumulation_dtype=torch.float32)
        optimizer.backward(loss_of_batch(model))
        found.append(optimizer.step().grad_norm)
    assert found[0] == found[1]
    assert read_again
