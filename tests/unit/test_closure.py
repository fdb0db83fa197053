"""`step(closure)`: forward and backward inside of it, once, on the user's side, and the update after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from tests.lib import engines
from tests.lib.covering import covering, named
from tests.lib.engines import ON_CPU, assert_same_state, squared, state
from tests.lib.models import Blocks, batch_of
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, simulated

STREAMS = {"inline": inline, "simulated": simulated}
ROWS = covering(
    {"precision": ["fp32", "bf16", "fp16"], "overlap": ["none", "forward", "backward"], "streams": list(STREAMS)},
    fits=lambda row: (row.get("precision"), row.get("overlap")) != ("fp16", "backward"),  # the scale is dynamic
)


def prepared(precision: str = "fp32", streams: Any = inline, **how: Any) -> tuple[Any, penstock.Optimizer]:
    return engines.prepared(Blocks, streams, precision=precision, **ON_CPU, **how)


def closure_of(model: torch.nn.Module, optimizer: Any, number: int, rank: int = 0) -> Callable[[], Tensor]:
    inputs = batch_of(model, 10 * rank + number)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squared(model(inputs))
        optimizer.backward(loss)
        return loss

    return closure


def train(rank: int, precision: str, streams: Any, overlap: str, closed: bool) -> list[Tensor]:
    """Three steps, with closures or without; losses, results and parameters."""
    model, optimizer = prepared(precision, streams, overlap=overlap)
    seen = []
    for number in range(3):
        closure = closure_of(model, optimizer, number, rank)
        loss = None if closed else closure()
        with torch.no_grad():  # as some callers are
            result = optimizer.step(closure) if closed else optimizer.step()
        assert (result.loss is not None) == closed
        seen += [(result.loss if closed else loss).detach(), torch.tensor([result.grad_norm, result.loss_scale])]
    seen += [optimizer.full_param(p) for p in model.parameters()]
    return seen


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_step_with_a_closure_is_forward_backward_and_step(row: Any) -> None:
    how = row["precision"], STREAMS[row["streams"]], row["overlap"]
    ours, expected = (train(0, *how, closed) for closed in (True, False))
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def both(rank: int) -> bool:
    ours, expected = (train(rank, "fp32", simulated, "forward", closed) for closed in (True, False))
    return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_ranks_meet_after_the_closure() -> None:
    assert run_ranks(both, 2) == [True, True]


def test_the_closure_runs_once_and_in_the_state_of_the_caller() -> None:
    model, optimizer = prepared()
    calls = []

    def closure() -> Tensor:
        calls.append(
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_default_dtype(),
                torch._C._is_torch_function_enabled(),
            )
        )
        return closure_of(model, optimizer, 0)()

    for context in (torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            optimizer.step(closure)
    assert calls == [(True, False, torch.float32, True), (True, True, torch.float32, True)]


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_an_error_in_the_closure_updates_nothing(where: str) -> None:
    model, optimizer = prepared()
    optimizer.step(closure_of(model, optimizer, 0))
    before = [optimizer.full_param(p) for p in model.parameters()]

    class MineError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise MineError

    def closure() -> Tensor:
        if where == "before":
            fail()
        register = "register_forward_hook" if where == "forward" else "register_full_backward_hook"
        hook = getattr(model.blocks[0], register)(fail)
        try:
            return closure_of(model, optimizer, 1)()
        finally:
            hook.remove()

    with pytest.raises(MineError):
        optimizer.step(closure)
    assert all(torch.equal(optimizer.full_param(p), b) for p, b in zip(model.parameters(), before, strict=True))
    other, undisturbed = prepared()
    undisturbed.step(closure_of(other, undisturbed, 0))
    for m, o in ((model, optimizer), (other, undisturbed)):
        o.step(closure_of(m, o, 2))
    assert_same_state(state(model, optimizer), state(other, undisturbed))


def test_what_the_closure_returns_is_returned_as_it_is() -> None:
    model, optimizer = prepared()
    answer = {"loss": object()}

    def closure() -> Any:
        closure_of(model, optimizer, 0)()
        return answer

    assert optimizer.step(closure).loss is answer
    assert optimizer.step().loss is None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)  # wraps `step`
    assert optimizer.step(closure=closure).loss is answer
    scheduler.step()


def test_a_skipped_step_has_the_loss_of_its_closure() -> None:
    model, optimizer = prepared()

    def closure() -> Tensor:
        loss = squared(model(torch.full((4, 8), 1e30)))
        optimizer.backward(loss)
        return loss

    with pytest.warns(UserWarning, match="not finite") as caught:
        result = optimizer.step(closure)
    assert caught[0].filename == __file__
    assert result.skipped
    assert result.loss is not None
