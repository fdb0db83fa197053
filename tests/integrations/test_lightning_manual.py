"""Manual optimisation: `automatic_optimization = False`, beside Lightning alone."""

from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.integrations.lightning import PenstockStrategy
from tests.integrations.lightning_cases import PAGE, RELEASED, assert_same_weights, fit, made, weights

PLAIN: dict[str, Any] = {"use_distributed_sampler": False}


class Manual(lightning.LightningModule):
    """Accumulates two batches, clips by itself, and steps its scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_manual_loop_is_that_of_lightning(precision: Any) -> None:
    ours, plain = made(Manual), made(Manual)
    compute = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]
    options = penstock.Options(debug_release=True, initial_loss_scale=2.0**10)
    fit(ours, PenstockStrategy(precision=compute, options=options), **PLAIN)
    fit(plain, "auto", **PLAIN)
    tolerance = 1e-6 if compute == "fp32" else 0.03
    torch.testing.assert_close(ours.losses, plain.losses, rtol=tolerance, atol=tolerance)
    assert_same_weights(weights(ours), weights(plain), tolerance)


class Closures(Manual):
    """Gives its optimizer a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            self.manual_backward(loss)
            return loss

        returned = optimizer.step(closure=closure)
        assert float(returned) == self.losses[-1]


def test_a_closure_runs_once_and_comes_back() -> None:
    ours, plain = made(Closures), made(Closures)
    fit(ours, PenstockStrategy(options=RELEASED), **PLAIN)
    fit(plain, "auto", **PLAIN)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-6, atol=1e-6)
    assert_same_weights(weights(ours), weights(plain))


class Adversaries(lightning.LightningModule):
    """A maker and a judge, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(8, 1), nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("it trains")

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.maker, self.judge)]


def test_several_optimizers_are_refused_and_the_page_has_a_recipe() -> None:
    module = made(Adversaries)
    with pytest.raises(penstock.ConfigError, match=r"2 optimizers.*docs/lightning\.md"):
        fit(module, PenstockStrategy())
    module.maker(torch.zeros(1, 8))  # nothing has changed
    assert "## Several optimizers" in PAGE.read_text()


def test_clipping_by_value_by_hand_is_refused() -> None:
    class ByValue(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.2, gradient_clip_algorithm="value")

    with pytest.raises(penstock.ConfigError, match="'norm'"):
        fit(made(ByValue), PenstockStrategy())


def test_a_backward_of_the_modules_own() -> None:
    class Own(Manual):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 1.0).backward(*args, **kwargs)

    ours, plain = made(Own), made(Own)
    fit(ours, PenstockStrategy(options=RELEASED), **PLAIN)
    fit(plain, "auto", **PLAIN)
    assert_same_weights(weights(ours), weights(plain))
    with pytest.raises(penstock.ConfigError, match=r"overrides backward\(\)"):
        fit(made(Own), PenstockStrategy(precision="fp16"))
