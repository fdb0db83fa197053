"""What a run does between its steps, beside training."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from penstock.train.signals import Interruption


class AllStepsMadeError(Exception):
    """A run goes on from the checkpoint of its last step: there is nothing to train."""


class InterruptCallback(TrainerCallback):
    """Ends a run that was asked to end, after its step, with a checkpoint. Every rank has one.

    Arguments:
        interruption: what takes the signals.

    Attributes:
        has_ended: whether it has ended the run.
    """

    def __init__(self, interruption: Interruption) -> None:
        self.has_ended = False
        self._interruption = interruption
        self._group: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note signals from now on. Collective.

        Raises:
            AllStepsMadeError: all steps were made. The trainer would make another one.
        """
        if state.global_step >= state.max_steps:
            raise AllStepsMadeError
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")  # on the host: no answer waits for a device
        self._interruption.defer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and end, where any rank was asked to. Collective."""
        asked = torch.tensor(float(self._interruption.number > 0), device="cpu")
        if self._group is not None:
            dist.all_reduce(asked, group=self._group)
        if asked:
            self.has_ended = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it may take longer than a scheduler waits
