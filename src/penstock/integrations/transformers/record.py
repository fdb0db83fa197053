"""A callback of `Trainer` that records its steps, for `penstock report`."""

import math
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from penstock import Optimizer
from penstock.errors import ConfigError
from penstock.integrations._common import StepRecord


class RecordCallback(TrainerCallback):
    """Records the steps of a trainer on Penstock: `Optimizer.record`, with what the trainer logs. Every rank has one.

    Its figures go into the trainer's logs beside each loss, so that trackers and the console have them:
    `penstock/waited` (the share of a step that compute stood still) and `penstock/waited/ROW`;
    `penstock/tokens_per_second` with `include_num_input_tokens_seen`, and `penstock/mfu` on a device whose peak is
    known. If a plan placed the model, the end of training logs it beside what was measured.

    Arguments:
        folder: where; `None` for the folder `record` in the trainer's `output_dir`. A training that is resumed goes on
            behind what is there.

    Example:
        >>> Ours = trainer_class(Trainer, placement={"optimizer": "cpu"})  # doctest: +SKIP
        >>> Ours(model=model, args=args, callbacks=[RecordCallback("runs/first")]).train()  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._steps: StepRecord | None = None
        self._token_count = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to record. Collective.

        Raises:
            ConfigError: the trainer is none of Penstock's.
        """
        self._close()  # of a training that ended with an exception
        wrapper = kwargs.get("optimizer")
        optimizer = getattr(wrapper, "optimizer", wrapper)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "RecordCallback records what Penstock trains, and this trainer is another one. Make it by "
                "trainer_class(Trainer, ...)."
            )
        folder = Path(args.output_dir, "record") if self._folder is None else Path(self._folder)
        settings = {name: value for name, value in args.to_sanitized_dict().items() if value not in (None, "")}
        self._token_count = int(state.num_input_tokens_seen)
        self._steps = StepRecord(
            optimizer,
            kwargs["model"],
            folder,
            begin=state.global_step,
            config=settings,
            device=args.device,
            seq_length=getattr(args, "max_length", None) or 0,  # of TRL's arguments
        )

    def figures(self) -> dict[str, float]:
        """Return the means over the steps since the last call; empty before training, and on ranks that do not log."""
        return {} if self._steps is None else self._steps.figures()

    @property
    def _record(self) -> Any:
        """The record, as long as it is open."""
        return None if self._steps is None or self._steps.record.closed else self._steps.record

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write what the trainer logs of a step: its loss, tokens since the last log where those are counted."""
        if self._record is None or not logs:
            return
        if "eval_loss" in logs:
            self._record.evaluation(float(logs["eval_loss"]), step=state.global_step)
        elif "loss" in logs and math.isfinite(float(logs["loss"])):
            self._record.log(step=state.global_step, loss=float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the tokens of a step, where `include_num_input_tokens_seen` has them counted."""
        seen = int(state.num_input_tokens_seen)
        if self._record is not None and seen > self._token_count:
            self._record.log(step=state.global_step, tokens=seen - self._token_count)
        self._token_count = seen

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the record. The trainer's optimizer stays."""
        self._close()

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
