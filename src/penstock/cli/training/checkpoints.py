"""Checkpoints of a run: where they are, what they say of the run, and how it goes on from one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

import penstock
from penstock.checkpoint.folder import LATEST, checkpoints_in
from penstock.cli.training.batches import sequence_count
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Tokens
from penstock.errors import CheckpointError, ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class Position:
    """How far a run is: steps made, and sequences that all ranks together have trained on."""

    step: int = 0
    sequences: int = 0


class Checkpoints:
    """Saves a run and takes it up again. Every rank makes every call.

    Arguments:
        optimizer: of the prepared model.
        scheduler: its learning rates.
        tokens: the text that is trained on; where a run was in it means nothing for another one.
    """

    def __init__(
        self, config: TrainConfig, optimizer: penstock.Optimizer, scheduler: LRScheduler, tokens: Tokens
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._text = {
            "seed": config.seed,
            "seq_length": config.seq_length,
            "sequences": sequence_count(len(tokens), config.seq_length),
        }

    def resume(self, path: Path | None) -> Position:
        """Go on from a checkpoint; from the beginning where there is none.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ConfigError: it is of another text, or of the same cut otherwise.
        """
        if path is None:
            return Position()
        extra = self._optimizer.load(path)
        try:
            step, sequences, text = int(extra["step"]), int(extra["sequences"]), dict(extra["text"])
            self._scheduler.load_state_dict(extra["scheduler"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not of penstock train: {error!r}. Name one that is.") from error
        for name, value in self._text.items():
            if text.get(name) != value:
                raise ConfigError(
                    f"{path} was trained on other data: {name} was {text.get(name)} and is {value}. Use the same "
                    "--data, --seed and --seq-length, or another --out."
                )
        return Position(step, sequences)

    def save(self, position: Position, *, blocking: bool) -> Path:
        """Save the run as it is now, and prune what is older than the newest `config.keep`."""
        path = checkpoints_of(self._config) / f"step-{position.step:08d}"
        extra: dict[str, Any] = {
            "step": position.step,
            "sequences": position.sequences,
            "text": self._text,
            "scheduler": self._scheduler.state_dict(),
            "config": self._config.to_dict(),
        }
        self._optimizer.save(path, extra=extra, blocking=blocking, keep=self._config.keep)
        return path

    def finish(self) -> None:
        """Wait for the one that is being written."""
        self._optimizer.synchronize()


def checkpoints_of(config: TrainConfig) -> Path:
    """The folder of a run's checkpoints."""
    return config.out / "checkpoints"


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """What `--resume` names; `None` for a run that begins."""
    if config.resume != AUTO:
        return Path(config.resume) if config.resume else None
    folder = checkpoints_of(config)
    return folder / LATEST if checkpoints_in(folder) else None
