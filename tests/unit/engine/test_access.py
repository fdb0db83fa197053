"""Changes by hand reach compute, gradients and masters, whatever the tiers."""

from typing import Any

import pytest
import torch

import penstock
from tests.lib.streams import inline, simulated
from tests.parity.rows import Arithmetic, Movement, Net, batches, loss_of, make_model, prepared

FIRST, SECOND, THIRD = ((step[0][0]) for step in batches(1, 1)[:3])


@pytest.fixture(params=[(inline, Movement()), (simulated, Movement(3, "cpu", "cpu", "cpu"))], ids=["device", "cpu"])
def handle(request: pytest.FixtureRequest) -> Any:
    streams, how = request.param
    model, optimizer = prepared(Arithmetic(), how.but(tile_bytes=4096), streams())
    yield model, optimizer
    optimizer.close()


Handle = tuple[Net, penstock.Optimizer]


def test_what_is_written_under_gathered_is_what_compute_reads_and_updates_start_from(handle: Handle) -> None:
    model, optimizer = handle
    plain = make_model()
    stock = Arithmetic().make_optimizer(list(plain.parameters()), foreach=False)
    with optimizer.gathered(modify=True), torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p[-1:].mul_(0.5)
            q[-1:].mul_(0.5)
    assert torch.equal(loss_of(model, FIRST), loss_of(plain, FIRST)), "in the next forward"
    optimizer.backward(loss_of(model, FIRST))
    optimizer.step()
    loss_of(plain, FIRST).backward()
    stock.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(p), q.detach(), rtol=1e-6, atol=1e-9)


def test_a_parameter_that_is_set_between_two_forwards_is_used_by_the_second(handle: Handle) -> None:
    """The outermost unit stays gathered after a forward, for the backward that does not come."""
    model, optimizer = handle
    plain = make_model()
    loss_of(model, FIRST)
    value = torch.full_like(plain.last.weight, 0.25)
    optimizer.set_full_param(model.last.weight, value)
    plain.last.weight.data.copy_(value)
    assert torch.equal(loss_of(model, SECOND), loss_of(plain, SECOND))


def test_a_micro_batch_adds_to_a_gradient_that_was_set(handle: Handle) -> None:
    model, optimizer = handle
    optimizer.backward(loss_of(model, FIRST))
    optimizer.zero_grad()
    optimizer.set_full_grad(model.first.bias, torch.full((32,), 2.0))
    optimizer.backward(loss_of(model, SECOND))
    plain = make_model()
    loss_of(plain, SECOND).backward()
    plain.first.bias.grad += 2.0
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.full_grad(p), q.grad)


def test_a_gradient_that_is_set_replaces_what_was_accumulated(handle: Handle) -> None:
    model, optimizer = handle
    optimizer.backward(loss_of(model, FIRST))
    optimizer.set_full_grad(model.first.bias, torch.full((32,), 2.0))
    plain = make_model()
    loss_of(plain, FIRST).backward()
    plain.first.bias.grad.fill_(2.0)
    squares = sum(q.grad.double().square().sum() for q in plain.parameters())
    assert optimizer.step().grad_norm == squares.sqrt().float().item()
