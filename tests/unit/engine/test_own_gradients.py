"""Gradients that people set by hand: never dropped in silence."""

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from tests.lib.engines import loss_of, prepared
from tests.lib.models import stack

WIDTH = 8


def net() -> tuple[nn.Sequential, penstock.Optimizer]:
    """A layer, and a frozen one."""
    model = stack(layers=2, width=WIDTH)
    model[1].requires_grad_(False)
    return prepared(model, stock=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize("verb", ["step", "clip_grad_norm_"])
def test_a_gradient_set_by_hand_is_the_gradient(verb: str) -> None:
    model, optimizer = net()
    before = [optimizer.full_param(p) for p in model.parameters()]
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    if verb == "clip_grad_norm_":
        assert float(optimizer.clip_grad_norm_(2 * WIDTH)) == WIDTH
    assert torch.equal(optimizer.full_grad(model[0].weight), torch.ones(WIDTH, WIDTH))
    assert optimizer.step().grad_norm == WIDTH
    torch.testing.assert_close(optimizer.full_param(model[0].weight), before[0] - 0.1)
    assert torch.equal(optimizer.full_param(model[0].bias), before[1])
    optimizer.close()


def test_gradients_of_autograd_grad_are_taken_too() -> None:
    model, optimizer = net()
    optimizer.backward(loss_of(model))
    with optimizer.gathered():
        (grad,) = torch.autograd.grad(loss_of(model), [model[0].bias])
    model[0].bias.grad = 2 * grad
    assert torch.equal(optimizer.full_grad(model[0].bias), 2 * grad)
    optimizer.zero_grad()
    assert model[0].bias.grad is None
    assert optimizer.step().grad_norm == 0
    optimizer.close()


def test_what_no_gradient_can_be_is_refused_by_name() -> None:
    model, optimizer = net()
    optimizer.backward(loss_of(model))
    model[0].weight.grad = torch.eye(WIDTH).to_sparse()
    with pytest.raises(ConfigError, match=r"'0\.weight' is sparse"):
        optimizer.step()
    model[0].weight.grad = None
    assert not optimizer.step().skipped
    optimizer.close()


@pytest.mark.parametrize("through_the_model", [False, True])
def test_zero_grad_forgets_them(through_the_model: bool) -> None:
    model, optimizer = net()
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    model[1].weight.grad = torch.ones(WIDTH, WIDTH)  # frozen: as in torch, nobody asks
    (model if through_the_model else optimizer).zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.step().grad_norm == 0
    optimizer.close()


def test_a_gradient_set_before_a_backward_is_part_of_it() -> None:
    """As in torch, which adds to it."""
    model, optimizer = net()
    optimizer.backward(loss_of(model))
    alone = optimizer.full_grad(model[0].weight)
    optimizer.zero_grad()
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    model[1].weight.grad = torch.ones(WIDTH, WIDTH)  # of a frozen parameter: nobody's business
    optimizer.backward(loss_of(model))
    torch.testing.assert_close(optimizer.full_grad(model[0].weight), alone + 1)
    assert not optimizer.step().skipped
    optimizer.close()
