"""The trainer of `penstock train`: TRL's SFTTrainer on Penstock."""

from typing import Any

from trl import SFTTrainer

from penstock.integrations.transformers import trainer_class


def sft_class(**prepare_arguments: Any) -> type[Any]:
    """Make the class of a run's trainer.

    Arguments:
        prepare_arguments: those of `penstock.prepare`.
    """
    return trainer_class(SFTTrainer, **prepare_arguments)
