"""Updates that run after `step` has returned: what waits for them, what sees them, and where their errors go."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, FETCH, READ, UPDATE, WRITE, Event, Streams, Work
from tests.lib.engines import prepare_on
from tests.lib.memory import shorten_rings
from tests.lib.streams import BreakingStreams, BrokenError, inline, is_released, separate

BLOCKS, WIDTH = 4, 32
SLOW_SECONDS = 0.05
EVERYTHING, OPTIMIZER = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}, {"optimizer": "nvme"}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def slow(stream: str) -> SimulatedStreams:
    return SimulatedStreams(lambda name, nbytes: SLOW_SECONDS if name == stream else 0.0)


def prepared(streams: Streams, overlap: str, tiers: dict[str, str], disk: Path) -> tuple[Net, penstock.Optimizer]:
    model = Net()
    stock = torch.optim.AdamW(model.parameters(), lr=0.1)
    placement = penstock.Placement(**tiers, nvme_path=disk)
    return model, prepare_on(streams, model, stock, placement=placement, overlap=overlap)


def backward(model: Net, optimizer: penstock.Optimizer) -> None:
    optimizer.backward(model(torch.ones(1, WIDTH)).float().square().sum())


def updated(optimizer: penstock.Optimizer) -> list[bool]:
    """Of each unit in order, whether its update is over."""
    return [unit.trained.optimizer.memory.written.done() for unit in optimizer._engine.context.units]


class GatedStreams(SimulatedStreams):
    """Updates run when they are let through, one by one in order."""

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.let_through = threading.Semaphore(0)

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def gated() -> Any:
            assert self.let_through.acquire(timeout=60)
            return work()

        return super().submit(stream, gated if stream == UPDATE else work, **rest)


@pytest.mark.parametrize("overlap", ["forward", "auto"])
def test_forward_of_a_unit_waits_for_its_update_alone(overlap: str, tmp_path: Path) -> None:
    streams = GatedStreams()
    model, optimizer = prepared(streams, overlap, EVERYTHING, tmp_path)
    backward(model, optimizer)
    optimizer.step()
    assert updated(optimizer) == [False] * BLOCKS
    optimizer.zero_grad()
    seen: list[list[bool]] = []

    def after_forward(*_: Any) -> None:
        seen.append(updated(optimizer))
        streams.let_through.release()

    for block in model:
        block.register_forward_hook(after_forward)
    streams.let_through.release()
    model(torch.ones(1, WIDTH))
    assert seen == [[index <= number for index in range(BLOCKS)] for number in range(BLOCKS)]
    optimizer.close()


def test_without_overlap_step_returns_when_updates_have_run(tmp_path: Path) -> None:
    model, optimizer = prepared(slow(UPDATE), "none", EVERYTHING, tmp_path)
    backward(model, optimizer)
    optimizer.step()
    assert all(updated(optimizer))
    optimizer.close()


@pytest.mark.parametrize("streams", [lambda: slow(UPDATE), separate, inline], ids=["late", "separate", "inline"])
def test_resident_parameters_show_their_update_as_the_mode_says(streams: Callable[[], Streams], tmp_path: Path) -> None:
    for overlap in ("none", "auto", "forward"):
        model, optimizer = prepared(streams(), overlap, OPTIMIZER, tmp_path)
        backward(model, optimizer)
        before = [p.float().clone() for p in model.parameters()]
        optimizer.step()
        shown = [None if is_released(p) else p.float().clone() for p in model.parameters()]
        if overlap == "forward":
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
        if overlap == "forward" and isinstance(optimizer._engine.context.streams, SimulatedStreams):
            assert shown == [None] * len(shown)
        optimizer.close()


def looks(model: Net, optimizer: penstock.Optimizer) -> dict[str, Callable[[], Any]]:
    """Everything that shows state, as nested lists."""
    first, last = model[0][0].weight, model[-1][0].weight

    def gathered() -> Any:
        with optimizer.gathered():
            return last.tolist()

    def evaluate() -> Any:
        with torch.no_grad():
            return model(torch.ones(1, WIDTH)).tolist()

    def synchronized() -> Any:
        optimizer.synchronize()
        assert all(updated(optimizer))
        assert not any(row.in_flight for row in optimizer.locations().rows)

    def state() -> Any:
        found = optimizer.state_dict()["state"]
        return [[found[n][k].tolist() for k in sorted(found[n])] for n in found]

    return {
        "full_param": lambda: optimizer.full_param(last).tolist(),
        "full_state": lambda: optimizer.full_state(last, "exp_avg").tolist(),
        "full_grad": lambda: optimizer.full_grad(first).tolist(),
        "state_dict": state,
        "gathered": gathered,
        "evaluate": evaluate,
        "synchronize": synchronized,
    }


@pytest.mark.parametrize(
    ("stream", "tiers"),
    [(UPDATE, EVERYTHING), (WRITE, EVERYTHING), (UPDATE, OPTIMIZER)],
    ids=["update", "write", "update, optimizer"],
)
def test_looks_see_finished_updates(stream: str, tiers: dict[str, str], tmp_path: Path) -> None:
    for look in looks(Net(), None):  # type: ignore[arg-type] # their names
        found = []
        for streams, overlap in ((slow(stream), "forward"), (inline(), "none")):
            torch.manual_seed(0)
            model, optimizer = prepared(streams, overlap, tiers, tmp_path)
            backward(model, optimizer)
            optimizer.step()
            found.append(looks(model, optimizer)[look]())
            optimizer.close()
        assert found[0] == found[1], look


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else forward finds its parameters in the ring of the update, and needs no file."""
    shorten_rings(monkeypatch)


def again(model: Net, optimizer: penstock.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()
    optimizer.synchronize()


CALLS: dict[str, Callable[[Net, penstock.Optimizer], Any]] = {
    "forward": lambda model, optimizer: model(torch.ones(1, WIDTH)),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "full_param": lambda model, optimizer: optimizer.full_param(model[0][0].weight),
    "full_state": lambda model, optimizer: optimizer.full_state(model[0][0].weight, "exp_avg"),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "gathered": lambda model, optimizer: optimizer.gathered().__enter__(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "close": lambda model, optimizer: optimizer.close(),
}


def descriptors() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{name}").exists()
    }


@pytest.mark.usefixtures("short_rings")
@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("stream", [FETCH, UPDATE, WRITE])
@pytest.mark.parametrize("call", CALLS)
def test_an_update_that_failed_is_raised_by_the_next_call(call: str, stream: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = prepared(streams, "forward", EVERYTHING, tmp_path)
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
    assert set(threading.enumerate()) == threads
    assert list(tmp_path.iterdir()) == []
    assert not any(str(tmp_path) in name for name in descriptors())


class BrokenRuleError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("overlap", ["none", "forward", "auto", "backward"])
def test_the_error_of_an_update_has_the_trace_of_its_thread(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(slow(UPDATE), overlap, EVERYTHING, tmp_path)
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
        model(torch.ones(1, WIDTH))
    assert "update_that_breaks" in [frame.name for frame in raised.traceback]
    with pytest.raises(BrokenRuleError):
        optimizer.close()


@pytest.mark.parametrize("stream", [DOWNLOAD, WRITE])
def test_gradients_that_did_not_reach_their_file_are_raised_by_step_or_what_comes_next(
    stream: str, tmp_path: Path
) -> None:
    streams = BreakingStreams()
    model, optimizer = prepared(streams, "forward", EVERYTHING, tmp_path)
    streams.broken = stream
    with pytest.raises(BrokenError, match=stream):
        again(model, optimizer)
    with pytest.raises(BrokenError, match=stream):
        optimizer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_rings")
@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_a_gather_that_failed_is_raised_by_forward_and_nothing_is_lost(tmp_path: Path) -> None:
    streams = BreakingStreams()
    model, optimizer = prepared(streams, "forward", EVERYTHING, tmp_path)
    again(model, optimizer)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    streams.broken = READ
    with pytest.raises(BrokenError, match=READ):
        model(torch.ones(1, WIDTH))
    optimizer.close()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
    assert list(tmp_path.iterdir()) == []
