"""Updates that run after `step` has returned: what waits for them, what sees them, and where their errors go."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import COLLECTIVE, DOWNLOAD, FETCH, READ, UPDATE, UPLOAD, WRITE, Streams
from tests.accounts import file_bytes
from tests.lib.engines import ON_CPU, ON_NVME, assert_same_state, loss_of, prepared, state
from tests.lib.memory import shorten_rings
from tests.lib.models import batch_of, stack
from tests.lib.streams import BreakingStreams, BrokenError, GatedStreams, inline, is_released, separate

LAYERS, WIDTH = 4, 32
OPTIMIZER = {"optimizer": "nvme"}


def slow(stream: str) -> SimulatedStreams:
    return SimulatedStreams(lambda name, nbytes: 0.02 if name == stream else 0.0)


def overlapping(streams: Any, overlap: str, where: dict[str, str], disk: Path) -> tuple[Any, penstock.Optimizer]:
    how = {"precision": "bf16", "overlap": overlap, "nvme_path": disk, "tile_bytes": 4 << 20, **where}
    return prepared(lambda: stack(layers=LAYERS, width=WIDTH), streams, **how)


def backward(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(loss_of(model))


def updated(optimizer: penstock.Optimizer) -> list[bool]:
    """Of each unit in order, whether its update is over."""
    return [unit.trained.optimizer.memory.written.done() for unit in optimizer._engine.context.units]


@pytest.mark.parametrize("overlap", ["forward", "auto"])
def test_forward_of_a_unit_waits_for_its_update_alone(overlap: str, tmp_path: Path) -> None:
    streams = GatedStreams(UPDATE)
    model, optimizer = overlapping(streams, overlap, ON_NVME, tmp_path)
    backward(model, optimizer)
    optimizer.step()
    assert updated(optimizer) == [False] * LAYERS
    optimizer.zero_grad()
    seen: list[list[bool]] = []

    def after_forward(*_: Any) -> None:
        seen.append(updated(optimizer))
        streams.let_through.release()

    for block in model:
        block.register_forward_hook(after_forward)
    streams.let_through.release()
    loss_of(model)
    assert seen == [[index <= number for index in range(LAYERS)] for number in range(LAYERS)]


def test_without_overlap_step_returns_when_updates_have_run(tmp_path: Path) -> None:
    model, optimizer = overlapping(slow(UPDATE), "none", ON_NVME, tmp_path)
    backward(model, optimizer)
    optimizer.step()
    assert all(updated(optimizer))


@pytest.mark.parametrize("make", [partial(GatedStreams, UPDATE), separate, inline], ids=["late", "separate", "inline"])
def test_resident_parameters_show_their_update_as_the_mode_says(make: Callable[[], Streams], tmp_path: Path) -> None:
    for overlap in ("none", "auto", "forward"):
        streams = make()
        gate = getattr(streams, "let_through", threading.Semaphore())
        model, optimizer = overlapping(streams, overlap, OPTIMIZER, tmp_path)
        backward(model, optimizer)
        if overlap != "forward":
            gate.release(LAYERS)
        before = [p.float().clone() for p in model.parameters()]
        optimizer.step()
        shown = [None if is_released(p) else p.float().clone() for p in model.parameters()]
        if overlap == "forward":
            gate.release(LAYERS)
            backward(model, optimizer)  # a use: from here on they show it
            whole = [p.detach().float() for p in model.parameters()]
        else:
            whole = shown
        exact = [optimizer.full_param(p) for p in model.parameters()]
        assert not any(torch.equal(a, b) for a, b in zip(whole, before, strict=True))
        for value, true in zip(whole, exact, strict=True):
            torch.testing.assert_close(value, true, rtol=1e-2, atol=1e-2)
        for value, now in zip(shown, whole, strict=True):
            assert value is None or torch.equal(value, now), overlap
        if overlap == "forward" and isinstance(streams, GatedStreams):
            assert shown == [None] * len(shown)


def gathered(model: nn.Module, optimizer: penstock.Optimizer) -> Any:
    with optimizer.gathered():
        return model[-1].weight.tolist()


def evaluated(model: nn.Module, optimizer: penstock.Optimizer) -> Any:
    with torch.no_grad():
        return model(batch_of(model)).tolist()


def synchronized(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    optimizer.synchronize()
    assert all(updated(optimizer))
    assert not any(row.in_flight for row in optimizer.locations().rows)


#: Everything that shows state.
LOOKS: dict[str, Callable[[nn.Module, penstock.Optimizer], Any]] = {
    "full_param": lambda model, optimizer: optimizer.full_param(model[-1].weight).tolist(),
    "full_state": lambda model, optimizer: optimizer.full_state(model[-1].weight, "exp_avg").tolist(),
    "full_grad": lambda model, optimizer: optimizer.full_grad(model[0].weight).tolist(),
    "state_dict": lambda model, optimizer: str(optimizer.state_dict()["state"]),
    "gathered": gathered,
    "evaluate": evaluated,
    "synchronize": synchronized,
}


@pytest.mark.parametrize(
    ("stream", "where"),
    [(UPDATE, ON_NVME), (WRITE, ON_NVME), (UPDATE, OPTIMIZER)],
    ids=["update", "write", "update, optimizer"],
)
def test_looks_see_finished_updates(stream: str, where: dict[str, str], tmp_path: Path) -> None:
    model, optimizer = overlapping(slow(stream), "forward", where, tmp_path)
    other_model, other = overlapping(inline, "none", where, tmp_path)
    for name, look in LOOKS.items():
        for each in ((model, optimizer), (other_model, other)):
            backward(*each)
            each[1].step()
        assert look(model, optimizer) == look(other_model, other), name
        optimizer.zero_grad()
        other.zero_grad()
    assert_same_state(state(model, optimizer), state(other_model, other))


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else forward finds its parameters in the ring of the update, and needs no file."""
    shorten_rings(monkeypatch)


def again(model: nn.Module, optimizer: penstock.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()
    optimizer.synchronize()


CALLS: dict[str, Callable[[nn.Module, penstock.Optimizer], Any]] = {
    "forward": lambda model, optimizer: loss_of(model),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "full_param": lambda model, optimizer: optimizer.full_param(model[0].weight),
    "full_state": lambda model, optimizer: optimizer.full_state(model[0].weight, "exp_avg"),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "gathered": lambda model, optimizer: optimizer.gathered().__enter__(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "close": lambda model, optimizer: optimizer.close(),
}


@pytest.mark.usefixtures("short_rings")
@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize(
    ("call", "stream"),
    [*((call, UPDATE) for call in CALLS), *((call, s) for call in ("forward", "close") for s in (FETCH, WRITE))],
)
def test_an_update_that_failed_is_raised_by_the_next_call(call: str, stream: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = overlapping(streams, "forward", ON_NVME, tmp_path)
    backward(model, optimizer)
    optimizer.synchronize()
    streams.broken = stream
    optimizer.step()
    streams.broken = None  # what comes later is not at fault
    with pytest.raises(BrokenError, match=stream):
        CALLS[call](model, optimizer)
    if call != "close":
        with pytest.raises(BrokenError, match=stream):
            optimizer.close()
    optimizer.close()
    assert all(p.numel() == 0 for p in model.parameters()), "no half-updated values are passed off as whole"
    assert_given_back(model, threads, tmp_path)


class BrokenRuleError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_the_error_of_an_update_has_the_trace_of_its_thread(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = overlapping(slow(UPDATE), overlap, ON_NVME, tmp_path)
    threads = []

    def update_that_breaks(*_: Any) -> None:
        threads.append(threading.current_thread())
        raise BrokenRuleError

    monkeypatch.setattr(type(optimizer._engine.context.rule), "update_many", update_that_breaks)
    with pytest.raises(BrokenRuleError) as raised:
        again(model, optimizer)
    assert "update_that_breaks" in [frame.name for frame in raised.traceback]
    assert threading.main_thread() not in threads
    with pytest.raises(BrokenRuleError) as raised:
        loss_of(model)
    assert "update_that_breaks" in [frame.name for frame in raised.traceback]
    with pytest.raises(BrokenRuleError):
        optimizer.close()


def assert_given_back(model: nn.Module, threads: set[threading.Thread], disk: Path) -> None:
    assert set(threading.enumerate()) == threads
    assert "zero_grad" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(disk.iterdir()) == []
    assert file_bytes(disk) == 0


@pytest.mark.parametrize(("stream", "keep_params"), [(COLLECTIVE, True), (DOWNLOAD, False), (WRITE, True)])
def test_gradients_that_did_not_reach_their_home_are_raised_by_step_or_what_comes_next(
    stream: str, keep_params: bool, tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = overlapping(streams, "forward", ON_NVME, tmp_path)
    streams.broken = stream
    with pytest.raises(BrokenError, match=stream):
        again(model, optimizer)
    with pytest.raises(BrokenError, match=stream):
        optimizer.close(keep_params=keep_params)
    assert_given_back(model, threads, tmp_path)
    assert all(p.numel() == 0 for p in model.parameters()), "no half-updated values are passed off as whole"


@pytest.mark.usefixtures("short_rings")
@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize(("stream", "where"), [(READ, ON_NVME), (UPLOAD, ON_CPU)])
def test_a_gather_that_failed_is_raised_by_forward_and_nothing_is_lost(
    stream: str, where: dict[str, str], tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = overlapping(streams, "forward", where, tmp_path)
    again(model, optimizer)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    streams.broken = stream
    with pytest.raises(BrokenError, match=stream):
        loss_of(model)
    optimizer.close()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
    assert_given_back(model, threads, tmp_path)


def test_parameters_that_do_not_fit_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = overlapping(separate, "forward", ON_CPU, tmp_path)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    access = optimizer._engine.access
    whole = access.own_param
    given: list[nn.Parameter] = []

    def own_param(parameter: nn.Parameter) -> torch.Tensor:
        if len(given) == 3:
            raise torch.OutOfMemoryError("no room for the fourth")
        given.append(parameter)
        return whole(parameter)

    with monkeypatch.context() as patch:
        patch.setattr(access, "own_param", own_param)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.close()
    backward(model, optimizer)
    optimizer.zero_grad()
    optimizer.close()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
