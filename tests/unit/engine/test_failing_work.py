"""Work that fails late surfaces where its result is needed, and close gives everything back all the same."""

import threading

import pytest
import torch

import penstock
from penstock.runtime.streams import COLLECTIVE, DOWNLOAD, UPDATE, UPLOAD
from tests.lib.streams import BreakingStreams, BrokenError
from tests.parity.rows import PLACEMENTS, Arithmetic, Net, batches, loss_of, prepared

BATCH = batches(1, 1)[0][0][0]
EVERYTHING_ON_CPU = PLACEMENTS[2]


def after_one_step(streams: BreakingStreams) -> tuple[Net, penstock.Optimizer]:
    model, optimizer = prepared(Arithmetic(), EVERYTHING_ON_CPU, streams)
    optimizer.backward(loss_of(model, BATCH))
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward_and_step(optimizer: penstock.Optimizer, loss: torch.Tensor) -> None:
    """Whichever of these first needs what failed meets the error."""
    optimizer.backward(loss)
    optimizer.step()
    optimizer.synchronize()


def assert_given_back(model: Net, threads: set[threading.Thread]) -> None:
    assert set(threading.enumerate()) == threads
    assert "zero_grad" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("stream", [COLLECTIVE, DOWNLOAD, UPDATE])
@pytest.mark.parametrize("keep_params", [True, False])
def test_a_step_that_failed_raises_and_close_gives_everything_back(stream: str, keep_params: bool) -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = after_one_step(streams)
    loss = loss_of(model, BATCH)
    streams.broken = stream
    with pytest.raises(BrokenError, match=stream):
        backward_and_step(optimizer, loss)
    with pytest.raises(BrokenError, match=stream):
        optimizer.close(keep_params=keep_params)
    assert_given_back(model, threads)
    assert all(p.numel() == 0 for p in model.parameters()), "no half-updated values are passed off as whole"
    optimizer.close()


@pytest.mark.filterwarnings("ignore:module forward hook with")
def test_a_gather_that_failed_raises_and_close_keeps_the_parameters() -> None:
    threads = set(threading.enumerate())
    streams = BreakingStreams()
    model, optimizer = after_one_step(streams)
    expected = [optimizer.full_param(p) for p in model.parameters()]
    streams.broken = UPLOAD
    with pytest.raises(BrokenError, match=UPLOAD):
        loss_of(model, BATCH)
    optimizer.close()
    assert_given_back(model, threads)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))


def test_parameters_that_do_not_fit_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = after_one_step(BreakingStreams())
    expected = [optimizer.full_param(p) for p in model.parameters()]
    access = optimizer._engine.access
    whole = access.own_param
    given = []

    def own_param(parameter: torch.nn.Parameter) -> torch.Tensor:
        if len(given) == 3:
            raise torch.OutOfMemoryError("no room for the fourth")
        given.append(parameter)
        return whole(parameter)

    monkeypatch.setattr(access, "own_param", own_param)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.close()
    monkeypatch.undo()
    optimizer.backward(loss_of(model, BATCH))
    optimizer.zero_grad()
    optimizer.close()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
