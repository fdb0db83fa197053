"""Exceptions in the middle: dropped with `zero_grad`, they leave the run as if they had not been."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.lib.engines import ON_CPU, prepared, squared
from tests.lib.models import Blocks
from tests.lib.streams import inline, simulated
from tests.models.family import Batch

STREAMS: dict[str, tuple[Any, dict[str, str]]] = {"inline": (inline, {}), "simulated": (simulated, ON_CPU)}


class OutOfLuckError(Exception):
    pass


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise OutOfLuckError


def fail(*args: object) -> None:
    raise OutOfLuckError


# Where the one bad micro-batch fails: each puts a hook on the model, and returns what takes it off.
FAILURES: dict[str, Callable[[nn.Module], object]] = {
    "forward, before the first block": lambda m: m.blocks[0].register_forward_pre_hook(fail, prepend=True),
    "forward, at the input of a block": lambda m: m.blocks[2].register_forward_pre_hook(fail),
    "forward, inside a block": lambda m: m.blocks[1].up.register_forward_hook(fail),
    "forward, after a block": lambda m: m.blocks[1].register_forward_hook(fail),
    "forward, before the model": lambda m: m.register_forward_pre_hook(fail, prepend=True),
    "forward, after the model": lambda m: m.register_forward_hook(fail),
    "backward, in the last layer": lambda m: m.last.register_forward_hook(lambda *a: FailsInBackward.apply(a[-1])),
    "backward, inside a block": lambda m: m.blocks[1].up.register_forward_hook(lambda *a: FailsInBackward.apply(a[-1])),
    "backward, between blocks": lambda m: m.blocks[1].register_forward_hook(lambda *a: FailsInBackward.apply(a[-1])),
    "backward, at the end": lambda m: m.first.register_forward_hook(lambda *a: FailsInBackward.apply(a[-1])),
}


def make(streams: str) -> tuple[nn.Module, penstock.Optimizer]:
    make_streams, placed = STREAMS[streams]
    return prepared(Blocks(3), make_streams, **placed)


def one_step(model: nn.Module, optimizer: penstock.Optimizer, step: int) -> Tensor:
    loss = squared(model(Batch(step).floats(4, 8)))
    optimizer.backward(loss)
    assert not optimizer.step().skipped
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("where", FAILURES)
def test_a_step_after_a_failure_is_as_if_it_had_not_been(where, streams):
    def run(fails: bool) -> list[Tensor]:
        model, optimizer = make(streams)
        losses = [one_step(model, optimizer, 0)]
        if fails:
            optimizer.backward(squared(model(Batch(7).floats(4, 8))))  # a good micro-batch, dropped with the bad one
            for backward in (optimizer.backward, torch.Tensor.backward):
                hook = FAILURES[where](model)
                with pytest.raises(OutOfLuckError):
                    backward(squared(model(Batch(9).floats(4, 8))))
                hook.remove()
            optimizer.zero_grad()
        losses += [one_step(model, optimizer, step) for step in (1, 2)]
        assert optimizer._engine.gatherer.live_bytes == 0 or streams == "inline", "nothing stays gathered"
        values = [optimizer.full_param(p) for p in model.parameters()]
        optimizer.close()
        return losses + values

    for ours, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("backward", [penstock.Optimizer.backward, None], ids=["optimizer.backward", "loss.backward"])
def test_gradients_of_a_backward_that_failed_are_never_used(backward, streams):
    model, optimizer = make(streams)
    hook = FAILURES["backward, between blocks"](model)
    loss = squared(model(Batch(0).floats(4, 8)))
    with pytest.raises(OutOfLuckError):
        backward(optimizer, loss) if backward else loss.backward()
    hook.remove()
    for _ in range(2):  # another backward does not make them whole
        with pytest.raises(penstock.EngineError, match=r"did not finish, so its gradients .* zero_grad\(\)"):
            optimizer.step()
        optimizer.backward(squared(model(Batch(0).floats(4, 8))))
    optimizer.zero_grad()
    one_step(model, optimizer, 0)
    optimizer.close()


@pytest.mark.parametrize("streams", STREAMS)
def test_an_interrupt_in_forward_does_not_stick(streams):
    """Hooks do not run on the way out of what is no `Exception`."""
    model, optimizer = make(streams)
    expected_model, expected = make(streams)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(Batch(0).floats(4, 8))
    hook.remove()
    for step in range(2):
        assert torch.equal(one_step(model, optimizer, step), one_step(expected_model, expected, step))
    assert optimizer._engine.gatherer.live_bytes == 0
    optimizer.close()
    expected.close()
