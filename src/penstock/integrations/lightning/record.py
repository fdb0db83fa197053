"""A callback of Lightning that records its steps, for `penstock report`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

from penstock.errors import ConfigError
from penstock.integrations._common import StepRecord
from penstock.integrations.lightning.strategy import PenstockStrategy


class RecordCallback(Callback):
    """Records the steps of a fit: `Optimizer.record`, with the losses of `training_step`. Every rank has one.

    Its figures are logged every `log_every_n_steps` steps, for loggers: `penstock/waited` (the share of a step that
    compute stood still) and `penstock/waited/ROW`, and the bytes of training state on each tier, `memory/TIER`. If a
    plan placed the module, the end of a fit logs it beside what was measured.

    Arguments:
        folder: where; `None` for the folder `record` in the trainer's `default_root_dir`. A fit that is resumed goes on
            behind what is there.

    Example:
        >>> trainer = Trainer(strategy="penstock", callbacks=[RecordCallback("runs/first")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._steps: StepRecord | None = None
        self._loss: Any = 0.0
        self._logged_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to record. Collective.

        Raises:
            ConfigError: the strategy is another one.
        """
        if not isinstance(trainer.strategy, PenstockStrategy):
            raise ConfigError("RecordCallback records what Penstock trains. Use Trainer(strategy='penstock').")
        self._close()
        folder = Path(trainer.default_root_dir, "record") if self._folder is None else Path(self._folder)
        settings = dict(pl_module.hparams) if isinstance(getattr(pl_module, "hparams", None), Mapping) else {}
        self._loss, self._logged_step = 0.0, trainer.global_step
        (optimizer,) = trainer.strategy.optimizers
        device = trainer.strategy.root_device
        begin = trainer.global_step
        self._steps = StepRecord(optimizer, pl_module, folder, begin=begin, config=settings, device=device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the loss of a step, the mean over its batches; it is read a step later, so nothing waits for it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or self._steps is None:
            return
        self._loss = self._loss + loss.detach()  # Lightning has divided it by the batches of a step
        record = self._steps.record
        if record.steps > self._logged_step:
            self._logged_step = record.steps
            record.log(loss=self._loss)
            self._loss = 0.0
            if record.steps % trainer.log_every_n_steps == 0:
                (optimizer,) = trainer.strategy.optimizers
                report = optimizer.locations()
                memory = {f"memory/{tier}": float(report.bytes(tier=tier)) for tier in ("device", "cpu", "nvme")}
                self.log_dict(memory | self._steps.figures())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the `val_loss` that the module has logged."""
        loss = trainer.callback_metrics.get("val_loss")
        if isinstance(loss, Tensor) and not trainer.sanity_checking and self._steps is not None:
            self._steps.record.evaluation(float(loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the record."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the record: its lines are whole up to here."""
        self._close()

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
