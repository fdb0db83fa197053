"""Checkpoints of a run: where they are, what they say of the run, and how it goes on from one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch.optim.lr_scheduler import LambdaLR

import penstock
from penstock.checkpoint.opened import LATEST, checkpoints_in
from penstock.cli.training.batches import sequence_count
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Tokens
from penstock.cli.training.schedule import warmup_cosine
from penstock.errors import CheckpointError, ConfigError, one_line

AUTO = "auto"
_MOST_STEPS = 1 << 53
_MOST_SEQUENCES = 1 << 62
#: Options of param groups as the command line calls them.
_OPTION_NAMES = {"initial_lr": "--lr", "weight_decay": "--weight-decay", "betas": "--betas"}


@dataclass(frozen=True)
class Position:
    """How far a run is: steps made, and sequences that all ranks together have trained on."""

    step: int = 0
    sequences: int = 0


class Checkpoints:
    """Saves a run and takes it up again. Every rank makes every call.

    Arguments:
        optimizer: of the prepared model, with the options that the run was asked for.
        tokens: the text that is trained on; where a run was in it means nothing for another one.

    Attributes:
        changed: what the run that goes on does otherwise than it did, for people; empty where nothing.
    """

    def __init__(self, config: TrainConfig, optimizer: penstock.Optimizer, tokens: Tokens) -> None:
        self._config = config
        self._optimizer = optimizer
        self._text = {
            "seed": config.seed,
            "seq_length": config.seq_length,
            "sequences": sequence_count(len(tokens), config.seq_length),
        }
        self._asked = [_options(group) | {"initial_lr": config.lr} for group in optimizer.param_groups]
        self.changed = ""

    def resume(self, path: Path | None) -> Position:
        """Go on from a checkpoint; from the beginning where there is none.

        Learning rates, weight decay and betas are those that this run was asked for, as everything else is: the
        schedule is a function of the step, and nothing of it is taken from the checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ConfigError: it is of another text, or of the same cut otherwise, or has made more steps than are asked for.
        """
        if path is None:
            return Position()
        position = self._check(path, self._optimizer.load(path))
        differing: dict[str, str] = {}
        for group, asked in zip(self._optimizer.param_groups, self._asked, strict=True):
            for name, option in _OPTION_NAMES.items():
                here, there = _shown(asked[name]), _shown(group.get(name))
                if here != there:
                    differing.setdefault(option, f"{option} {here} instead of {there}")
            group.update(asked)
        self.changed = ", ".join(differing.values())
        return position

    def _check(self, path: Path, extra: dict[str, Any]) -> Position:
        step, sequences, text = extra.get("step"), extra.get("sequences"), extra.get("text")
        if not (_counts(step, _MOST_STEPS) and _counts(sequences, _MOST_SEQUENCES) and isinstance(text, dict)):
            raise CheckpointError(
                f"{path} is not of penstock train: its steps are {one_line(repr(step), 40)}, its sequences "
                f"{one_line(repr(sequences), 40)}. Name one that is.",
                field="extra",
            )
        for name, value in self._text.items():
            was = text.get(name)
            if not isinstance(was, int) or was != value:
                raise ConfigError(
                    f"{path} was trained on other data: {name} was {one_line(repr(was), 40)} and is {value}. Use the "
                    "same --data, --seed and --seq-length, or another --out."
                )
        if step > self._config.steps:
            raise ConfigError(
                f"{path} has made {step} steps, more than --steps {self._config.steps}. Ask for {step} or more, or "
                "name another checkpoint."
            )
        return Position(step, sequences)

    def schedule(self, position: Position) -> LambdaLR:
        """The optimizer's learning rates, for a run that is at a position."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self._config.lr
        factor = warmup_cosine(warmup=self._config.warmup_steps, steps=self._config.steps)
        return LambdaLR(self._optimizer, factor, last_epoch=position.step - 1)

    def save(self, position: Position, *, blocking: bool) -> Path:
        """Save the run as it is now, and prune what is older than the newest `config.keep`."""
        path = checkpoints_of(self._config) / f"step-{position.step:08d}"
        extra: dict[str, Any] = {
            "step": position.step,
            "sequences": position.sequences,
            "text": self._text,
            "config": self._config.to_dict(),
        }
        self._optimizer.save(path, extra=extra, blocking=blocking, keep=self._config.keep)
        return path

    def finish(self) -> None:
        """Wait for the one that is being written."""
        self._optimizer.synchronize()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _shown(value: object) -> str:
    items = value if isinstance(value, list | tuple) else [value]
    return ",".join(repr(float(item)) if isinstance(item, int | float) else one_line(repr(item), 20) for item in items)


def _counts(value: object, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def checkpoints_of(config: TrainConfig) -> Path:
    """The folder of a run's checkpoints."""
    return config.out / "checkpoints"


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """What `--resume` names; `None` for a run that begins."""
    if config.resume != AUTO:
        return Path(config.resume) if config.resume else None
    folder = checkpoints_of(config)
    return folder / LATEST if checkpoints_in(folder) else None
