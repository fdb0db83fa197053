"""The mixin that stands before a trainer's class, and the class of both.

It puts an accelerator of ours in the place of accelerate's, which prepares, clips and scales; and it reads and writes
by Penstock what the loop would read and write whole. All else is the class's own: what is overridden is called from
outside, or stands between the loop and another library, in both releases of transformers that are tested.
"""

import functools
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from penstock import Optimizer
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations._common import check_unplaced
from penstock.integrations.accelerate.settings import PRECISIONS
from penstock.integrations.transformers import resuming, settings
from penstock.integrations.transformers.accelerator import TrainerAccelerator
from penstock.integrations.transformers.config import told_to_trainer
from penstock.integrations.transformers.record import RecordCallback
from penstock.integrations.transformers.resuming import STATE
from penstock.integrations.transformers.weights import is_empty, load_weights
from penstock.integrations.weights import is_adapted, saved_entries

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

OPTIMIZER_FILE = "optimizer.pt"
TIERS = ("device", "cpu", "nvme")

logger = logging.getLogger(__name__)


class PenstockTrainerMixin(Trainer):
    """What makes a trainer train by Penstock. Stands before the trainer's class; `trainer_class` does that.

    Attributes:
        penstock_arguments: of `penstock.prepare`, without `max_grad_norm`, which is that of `TrainingArguments`.
        penstock_training: fields of `TrainingArguments` that a file says too, with their values there.
        penstock_whole_weights: have weights for `from_pretrained` in every checkpoint, and not in the last alone.

    Example:
        >>> class MyTrainer(PenstockTrainerMixin, Trainer):  # doctest: +SKIP
        ...     penstock_arguments = {"placement": penstock.Placement(optimizer="cpu")}
    """

    penstock_arguments: ClassVar[Mapping[str, Any]] = {}
    penstock_training: ClassVar[Mapping[str, Any]] = {}
    penstock_whole_weights: ClassVar[bool] = False
    optimizer: Any
    _checkpoint: Path | None = None  # the one that is being saved

    @property
    def penstock(self) -> Optimizer:
        """The `penstock.Optimizer` of the model: its `gathered`, `locations`, `offload_states`, `close` and so on.

        Raises:
            ConfigError: nothing has prepared the model yet; `train`, `evaluate` and `predict` do.
        """
        return self.accelerator.optimizer_of(self.model)

    # What is made with the trainer

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator: once by the class itself, for all that it sets beside, and then ours."""
        settings.check_arguments(self.penstock_arguments)
        settings.check_training(self.args, self.penstock_training)
        if self.args.n_gpu > 1:
            logger.warning(
                "One process uses one of %d GPUs. Start a process for each: torchrun --nproc-per-node gpu.",
                self.args.n_gpu,
            )
            self.args._n_gpu = 1
        if self.args.max_grad_norm is None:
            self.args.max_grad_norm = 0.0  # what Trainer compares with; it says the same
        super().create_accelerator_and_postprocess()
        arguments = self._accelerator_arguments
        precision = settings.choose_precision(self.args, self.penstock_arguments, self.model)
        self.accelerator = TrainerAccelerator(
            lambda: self.model, penstock={**self.penstock_arguments, "precision": precision}, **arguments
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if (trl := _beside(type(self))) is not None:
            trl.begin(self)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Note what the class would make an accelerator with, in the precision that both have."""
        precision = settings.choose_precision(self.args, self.penstock_arguments, self.model)
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_arguments = arguments | {"mixed_precision": PRECISIONS[precision]}
        return self._accelerator_arguments

    def _validate_args(self) -> None:
        """Hold the model and the optimizers that were given against what Penstock can do."""
        super()._validate_args()
        check_unplaced(self.model)
        if isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                "optimizers=: the optimizer is what penstock.prepare() returned. Give the one that it was made of: "
                "this trainer prepares it. Or give this one to Trainer itself."
            )
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            settings.check_optim(self.args)

    # Where the model is

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the model where it is: it is placed from there, by `prepare`, as `placement=` says."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Wrap it in nothing: ranks are averaged by Penstock, and one process has one device."""
        if (trl := _beside(type(self))) is not None:
            trl.adopt(self)  # here, because the constructor of a subclass has run by now, wherever the mixin stands
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer as the class does, and settle what depends on the model that it trains."""
        if not self.accelerator.is_prepared(self.model):
            self.accelerator.take_over(self.model)
            arguments = self.accelerator.prepare_arguments
            arguments["precision"] = settings.choose_precision(self.args, self.penstock_arguments, self.model)
        return super().create_optimizer(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the class does. A model that may be trained later is prepared for that, and keeps its masters."""
        if self.train_dataset is not None and not self.accelerator.is_prepared(self.model):
            self.create_optimizer()
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return super().evaluation_loop(*args, **kwargs)

    # A run

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the class does. A run that is resumed has the rows of a step, and the trackers' runs, that it had.

        In the place of a checkpoint that was not written to its end, the newest before it is taken.

        Raises:
            CheckpointError: no checkpoint is whole; or one could not be written.
            ConfigError: at another number of ranks no `gradient_accumulation_steps` makes the rows of a step.
        """
        self._finish_checkpoint()  # of a training that ended with an exception
        chosen = resuming.choose_checkpoint(resume_from_checkpoint, self.args.output_dir)
        extra = resuming.read_extra(chosen)
        resuming.keep_batch(self, extra.get("batch", {}))
        is_own = extra and Path(chosen).resolve().parent == Path(self.args.output_dir).resolve()
        with resuming.same_runs(self, extra.get("trackers", {}) if is_own else {}):
            return super().train(chosen, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End a training once its last checkpoint is whole."""
        self._finish_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, in the dtype that it had, gathered part by part. Collective.

        Arguments:
            output_dir: the folder; `None` for that of the arguments.
        """
        if not self.accelerator.is_prepared(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder, state = Path(output_dir or self.args.output_dir), {}
        has_weights = not _internal_call or folder != self._checkpoint or self._keeps_weights()
        if has_weights:
            state = self.accelerator.gather_entries(self.model, saved_entries(self.model), keep=self.args.should_save)
        if self.args.should_save:
            self._save(str(folder), state_dict=state)
            for name in () if has_weights else (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
                (folder / name).unlink(missing_ok=True)  # without a tensor, or of a checkpoint before
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _keeps_weights(self) -> bool:
        """Return True if weights are saved with the checkpoint that is being saved."""
        is_last = self.state.global_step >= self.state.max_steps
        is_asked = self.args.save_only_model or self.penstock_whole_weights or self._is_pushed()
        return is_last or is_asked or is_adapted(self.model)

    def _is_pushed(self) -> bool:
        """Return True if each checkpoint is pushed to the hub."""
        return bool(self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint: what the class writes, then the state of training, beside the next steps. Collective.

        1. The checkpoint before is whole by now, or its error is raised; the oldest go.
        2. An empty folder for the state says that this one is not whole.
        3. The class writes its files. It would remove old checkpoints at their end, which this one's state is not.
        4. The marker of the state comes last: with it the checkpoint is whole.
        """
        self._finish_checkpoint()
        args, limit = self.args, self.args.save_total_limit
        self._checkpoint = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if args.process_index == 0:
            shutil.rmtree(self._checkpoint / STATE, ignore_errors=True)
            if not args.save_only_model:
                (self._checkpoint / STATE).mkdir(parents=True, exist_ok=True)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        if not (args.save_only_model or self._is_pushed()):
            self._save_state(blocking=False)
        if args.save_only_model or any(map(resuming.may_copy, self.callback_handler.callbacks)):
            self._finish_checkpoint()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of training if the folder is pushed next; else `_save_checkpoint` does, last. Collective."""
        self.args.save_total_limit = None  # until the checkpoint is whole
        if self._is_pushed():
            self._save_state(blocking=True)

    def _save_state(self, *, blocking: bool) -> None:
        """Save the state of training, sharded; of a model with adapters, without its base. Collective."""
        assert self._checkpoint is not None
        extra = {
            "scheduler": self.lr_scheduler.state_dict(),
            "batch": resuming.batch_of(self),
            "trackers": resuming.tracker_runs(self),
        }
        frozen = not is_adapted(self.model)
        self.penstock.save(self._checkpoint / STATE, extra=extra, blocking=blocking, frozen=frozen)

    def _finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being saved is whole, then remove the oldest.

        Raises:
            CheckpointError: it could not be written.
        """
        folder, self._checkpoint = self._checkpoint, None
        if folder is not None and self.accelerator.is_prepared(self.model):
            self.penstock.synchronize()  # site trainer.checkpoint_saved
            if self.args.should_save:
                resuming.remove_old(folder, self.args.save_total_limit, self.state.best_model_checkpoint)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load a checkpoint's weights, where no state of training comes with them that has them too. Collective."""
        folder = Path(resume_from_checkpoint)
        if (folder / STATE).is_dir():
            return
        if self.accelerator.is_prepared(self.model):
            self._issue_warnings_after_load(load_weights(self.penstock, self.model, folder))
        elif is_empty(self.model):
            self.accelerator.resumed = folder
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint's state: ours, at any number of ranks, or what Trainer itself wrote. Collective."""
        if checkpoint is None:
            return
        folder = Path(checkpoint, STATE)
        if folder.is_dir():
            with torch.random.fork_rng(devices=[]):  # Trainer restores it once samplers have drawn what is skipped
                extra = self.penstock.load(folder)
            if not isinstance(extra.get("scheduler"), dict):
                raise CheckpointError(f"{folder} has no state of a scheduler: no trainer wrote it.", field="extra")
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        elif Path(checkpoint, OPTIMIZER_FILE).is_file():
            logger.warning(
                "%s is of Trainer without Penstock: every rank reads all of its %s.", checkpoint, OPTIMIZER_FILE
            )
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            logger.warning("%s has weights and no state of an optimizer, which begins anew.", checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint: all of it, or its weights where it has no more. Collective."""
        best = Path(self.state.best_model_checkpoint)
        logger.info("Loading the best model from %s (score: %s).", best, self.state.best_metric)
        if (best / STATE).is_dir():
            self.penstock.load(best / STATE)
        else:
            self._issue_warnings_after_load(load_weights(self.penstock, self.model, best))

    # Logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the class logs, and beside a loss this rank's bytes on each tier and the figures of a record."""
        if "loss" in logs and self.accelerator.is_prepared(self.model):
            report = self.penstock.locations()
            logs.update({f"memory/{tier}": report.bytes(tier=tier) for tier in TIERS})
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, RecordCallback):
                    logs.update(callback.figures())
        super().log(logs, *args, **kwargs)


def _beside(trainer: type) -> Any:
    """Find what a class of trainers needs beside: the module for TRL's, imported for those alone; else `None`."""
    if not any(base.__module__.split(".")[0] == "trl" for base in trainer.__mro__):
        return None
    from penstock.integrations import trl

    return trl


def trainer_class(
    base: type,
    *,
    config: str | os.PathLike[str] | None = None,
    deepspeed: str | os.PathLike[str] | None = None,
    whole_weights: bool = False,
    **prepare_arguments: Any,
) -> type:
    """Make a class that trains as a trainer does, on Penstock.

    Arguments:
        base: `transformers.Trainer` or any subclass, those of TRL too.
        config: a JSON or YAML file of arguments. `None`: the one that the environment names as `PENSTOCK_CONFIG`.
        deepspeed: a configuration of DeepSpeed in the place of `config`, read as `penstock convert-config` does.
        whole_weights: have weights for `from_pretrained` in every checkpoint, gathered as it is saved.
        prepare_arguments: those of `penstock.prepare`, by their types or as files hold them; they count before those of
            a file. The precision is that of `TrainingArguments(bf16=, fp16=)`, else the model's own; clipping is its
            `max_grad_norm`.

    Returns:
        A subclass of `base`, with `PenstockTrainerMixin`. Of a class that has it already, one with these arguments too.

    Raises:
        ConfigError: an argument that there is not, one that Trainer has a setting of its own for, or a file that cannot
            be read.

    Example:
        >>> Ours = trainer_class(Trainer, placement={"optimizer": "cpu"})  # doctest: +SKIP
        >>> Ours(model=model, args=args, train_dataset=rows).train()  # doctest: +SKIP
    """
    told = told_to_trainer(prepare_arguments, config=config, deepspeed=deepspeed)
    settings.check_arguments(told.arguments)
    bases: tuple[type, ...] = (PenstockTrainerMixin, base)
    before: Mapping[str, Any] = {}
    if issubclass(base, PenstockTrainerMixin):
        bases, before = (base,), base.penstock_arguments
    attributes = {
        "penstock_arguments": {**before, **told.arguments},
        "penstock_training": told.training,
        **({"penstock_whole_weights": True} if whole_weights else {}),
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    return type(f"Penstock{base.__name__}", bases, attributes)
