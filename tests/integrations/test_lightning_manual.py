"""Manual optimisation: `automatic_optimization = False`, one optimizer or several, beside Lightning alone."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import penstock
from penstock.integrations.lightning import PenstockStrategy, consolidate
from tests.integrations.lightning_cases import RELEASED, assert_same_weights, fit, made, weights

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
    """A maker and a judge, as in Lightning's own example of a GAN, with a frozen part that both look through."""

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.judge = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.view = nn.Linear(1, 1).requires_grad_(False)
        self.toggles = toggles
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makers, judges = self.optimizers()  # type: ignore[misc]
        ones, zeros = torch.ones(len(batch[0]), 1), torch.zeros(len(batch[0]), 1)
        entropy = nn.functional.binary_cross_entropy_with_logits
        if self.toggles:
            self.toggle_optimizer(makers)
        loss = entropy(self.judge(self.view(self.maker(batch[0]))).float(), ones)
        self.losses.append(loss.item())
        makers.zero_grad()
        self.manual_backward(loss)
        makers.step()
        if self.toggles:
            self.untoggle_optimizer(makers)
            self.toggle_optimizer(judges)
        false = self.judge(self.view(self.maker(batch[0])).detach()).float()
        loss = entropy(self.judge(self.view(batch[1])).float(), ones) + entropy(false, zeros)
        self.losses.append(loss.item())
        judges.zero_grad()
        self.manual_backward(loss)
        judges.step()
        if self.toggles:
            self.untoggle_optimizer(judges)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.maker.parameters(), lr=1e-2),
            torch.optim.Adam(self.judge.parameters(), lr=4e-3, betas=(0.5, 0.9)),
        ]


@pytest.mark.parametrize("toggles", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adversaries_train_as_in_lightning(toggles: bool, precision: Any) -> None:
    ours, plain = made(Adversaries, toggles=toggles), made(Adversaries, toggles=toggles)
    fit(ours, PenstockStrategy(precision=precision, options=RELEASED), **PLAIN)
    fit(plain, "auto", **PLAIN)
    tolerance = 1e-6 if precision == "fp32" else 0.03
    torch.testing.assert_close(ours.losses, plain.losses, rtol=tolerance, atol=tolerance)
    assert_same_weights(weights(ours), weights(plain), tolerance)
    assert ours.view.weight.dtype == torch.float32


def test_adversaries_are_saved_resumed_and_consolidated(tmp_path: Path) -> None:
    whole, first, second = made(Adversaries), made(Adversaries), Adversaries()
    fit(whole, PenstockStrategy(options=RELEASED), **PLAIN)
    keeper = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    settings = {"callbacks": [keeper], "enable_checkpointing": True, "max_epochs": 1, **PLAIN}
    fit(first, PenstockStrategy(options=RELEASED), **settings)
    resumed = PenstockStrategy(placement=penstock.Placement(optimizer="cpu"), options=RELEASED)
    fit(second, resumed, ckpt_path=tmp_path / "last.ckpt", **PLAIN)
    assert second.losses == whole.losses[len(first.losses) :]
    assert_same_weights(weights(second), weights(whole), tolerance=0.0)
    consolidate(tmp_path / "last.ckpt", tmp_path / "model.ckpt")
    state = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert_same_weights(state, weights(first), tolerance=0.0)


def test_several_optimizers_of_one_submodule_are_refused() -> None:
    class Shared(Adversaries):
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.AdamW([self.maker[0].weight, *self.judge.parameters()], lr=1e-2),
                torch.optim.AdamW([self.maker[0].bias], lr=1e-2),
            ]

    module = made(Shared)
    with pytest.raises(penstock.ConfigError, match=r"Optimizer 0 of 2 .*one submodule"):
        fit(module, PenstockStrategy())
    module.maker(torch.zeros(1, 8))


def test_several_optimizers_in_fp16_are_refused() -> None:
    with pytest.raises(penstock.ConfigError, match="loss scale"):
        fit(made(Adversaries), PenstockStrategy(precision="fp16"))


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
