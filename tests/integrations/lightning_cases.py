"""Modules of Lightning, small enough for a test, and what a run of one leaves to be compared."""

import copy
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.integrations.lightning import PenstockStrategy
from tests.lib.memory import disks

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
#: Nothing is read in place, and what is released is poisoned: as on a device.
RELEASED = penstock.Options(debug_release=True)

SPLIT = {"device": 0.4, "cpu": 0.6}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "split": {"params": SPLIT, "grads": SPLIT, "optimizer": SPLIT},
    "nvme": {"params": "nvme", "optimizer": "nvme", "nvme_path": str(disks()[0])},
}


@dataclass
class Seen:
    """What a run has shown: a list of each, by step."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)


class Watch(lightning.Callback):
    """Notes what each step does, of any strategy."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._norm = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if not isinstance(trainer.strategy, PenstockStrategy):
            self._norm = float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        result = getattr(trainer.strategy, "step_result", None)
        self.seen.grad_norm.append(result.grad_norm if result is not None else self._norm)
        self.seen.lr.append(trainer.optimizers[0].param_groups[0]["lr"])


class Net(lightning.LightningModule):
    """Blocks, a parameter that `training_step` reads by itself, a buffer that counts, and tied weights."""

    def __init__(self, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(8, width)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 1)
        self.again = self.last
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.norm(self.blocks(self.first(x))))
        return out

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) * self.scale - y).square().mean() + 1e-2 * self.first.weight.square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.count += 1
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise LookupError("mine")
        return super().training_step(batch, batch_idx)


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


def data(batch_size: int = 4) -> DataLoader[Any]:
    """The same few batches, in order."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def made(kind: type[Any] = Net, **arguments: Any) -> Any:
    """A module from the same seed, always."""
    torch.manual_seed(0)
    return kind(**arguments)


def trainer(strategy: Any, **arguments: Any) -> lightning.Trainer:
    """A Trainer on cpus that writes nothing unless told."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(strategy=strategy, **settings | arguments)


def fit(module: Any, strategy: Any, *, ckpt_path: Path | None = None, **arguments: Any) -> Seen:
    """Fit a module in place, and return what was seen."""
    watch = Watch()
    callbacks = [*arguments.pop("callbacks", []), watch]
    run = trainer(strategy, callbacks=callbacks, **arguments)
    run.fit(module, data(), ckpt_path=ckpt_path)
    watch.seen.loss = module.losses
    return watch.seen


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in copy.deepcopy(module.state_dict()).items()}


def assert_same_weights(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(dict(ours), dict(plain), rtol=tolerance, atol=tolerance)


def assert_same_run(ours: Seen, plain: Seen, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(vars(ours), vars(plain), rtol=tolerance, atol=tolerance)
