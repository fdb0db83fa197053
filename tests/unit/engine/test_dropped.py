"""Engines that nobody closed: what becomes of them when the model, the optimizer or both are dropped."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.streams import HostWorker, Streams
from tests.accounts import what_engines_take
from tests.lib.engines import ON_CPU, ON_NVME, train
from tests.lib.engines import prepared as prepare
from tests.lib.memory import pinning_on_cpu
from tests.lib.models import stack
from tests.lib.streams import inline, separate, simulated

WIDTH = 16
DROPS_ENGINES = True


ROWS: dict[str, tuple[Callable[[], Streams], dict[str, Any]]] = {
    "device": (inline, {}),
    "cpu": (separate, ON_CPU),
    "nvme": (inline, ON_NVME),
    "threads": (simulated, {"params": "cpu", "optimizer": {"cpu": 0.5, "nvme": 0.5}, "activations": "cpu"}),
}


def make(row: str, disk: Path) -> tuple[nn.Module, penstock.Optimizer]:
    streams, storages = ROWS[row]
    return prepare(stack(), streams, **storages, nvme_path=disk if "nvme" in str(storages) else None)


def dies(*references: "weakref.ref[Any]") -> bool:
    """Whether they are dead, once threads have let go of what they are in the middle of."""
    for _ in range(12_000):  # two minutes
        gc.collect()
        if all(reference() is None for reference in references):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("row", ROWS)
def test_a_model_and_its_optimizer_that_are_dropped_give_everything_back(row: str, tmp_path: Path) -> None:
    def life() -> "tuple[weakref.ref[Any], ...]":
        model, optimizer = make(row, tmp_path)
        train(model, optimizer)
        return weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._engine), weakref.ref(model[0].weight)

    assert dies(*life())  # what torch makes once
    before = what_engines_take()
    assert dies(*life())
    assert what_engines_take() == before
    assert list(tmp_path.iterdir()) == []


def test_a_finished_engine_goes_with_the_first_collection(tmp_path: Path) -> None:
    model, optimizer = make("nvme", tmp_path)
    train(model, optimizer)
    optimizer.synchronize()
    references = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("row", ROWS)
def test_a_model_whose_optimizer_was_dropped_goes_on_until_it_goes(row: str, tmp_path: Path) -> None:
    """Its parameters are in the engine, which stays; the handle does not."""
    model, optimizer = make(row, tmp_path)
    train(model, optimizer)
    optimizer.synchronize()
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        expected = model(x)
    handle, engine = weakref.ref(optimizer), weakref.ref(optimizer._engine)
    del optimizer
    assert dies(handle)
    assert engine() is not None
    model.zero_grad()
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    model.zero_grad()
    assert torch.equal(model(x), expected)
    del model
    assert dies(engine)
    assert list(tmp_path.iterdir()) == []


def test_who_keeps_a_recorder_keeps_no_engine(tmp_path: Path) -> None:
    model, optimizer = make("device", tmp_path)
    recorder = optimizer.record(tmp_path)
    train(model, optimizer, 4)
    dropped = weakref.ref(optimizer._engine)
    del model, optimizer
    assert dies(dropped)
    recorder.close()
    assert '"event": "end"' in (tmp_path / "metrics.jsonl").read_text()


def test_an_optimizer_keeps_its_model(tmp_path: Path) -> None:
    model, optimizer = make("nvme", tmp_path)
    train(model, optimizer)
    values = [optimizer.full_param(p) for p in model.parameters()]
    reference = weakref.ref(model)
    del model
    gc.collect()
    parameters = optimizer.param_groups[0]["params"]
    assert all(torch.equal(optimizer.full_param(p), v) for p, v in zip(parameters, values, strict=True))
    optimizer.save(tmp_path / "ck")
    del optimizer, parameters
    assert dies(reference)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_an_engine_whose_update_failed_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error holds frames, and threads must not hold the error."""
    model, optimizer = make("threads", tmp_path)
    train(model, optimizer)

    def fail(*_: object) -> None:
        raise OSError("no update")

    monkeypatch.setattr(type(optimizer._engine.context.rule), "update_many", fail)
    with pytest.raises(OSError, match="no update"):
        train(model, optimizer, 4)
    references = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    assert dies(*references)


def test_what_was_pinned_is_unpinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pinned = pinning_on_cpu(monkeypatch)
    model, optimizer = make("cpu", tmp_path)
    train(model, optimizer)
    assert pinned
    reference = weakref.ref(optimizer._engine)
    del model, optimizer
    assert dies(reference)
    assert pinned == {}


def test_a_dropped_worker_gives_up_what_is_queued() -> None:
    worker = HostWorker("test")
    inbox, thread, begun, ran = worker._inbox, worker._thread, threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        while not inbox.dropped:
            time.sleep(0.001)
        ran.append(1)

    worker.submit(first)
    begun.wait()
    second = worker.submit(lambda: ran.append(2))
    del worker
    gc.collect()
    thread.join()
    assert ran == [1]
    with pytest.raises(penstock.EngineError, match="given up"):
        second.synchronize()


def test_a_dropped_worker_finishes_what_was_promised(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no room")

    worker = HostWorker("test", promised="Writing")
    worker.submit(lambda: ran.append(1))
    worker.submit(fail)
    thread = worker._thread
    del worker
    gc.collect()
    thread.join()
    assert ran == [1]
    assert caplog.messages == ["Writing failed: no room"]
