"""The checkpoints of a run: where they lie, what they say of the run, how it goes on from one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch.optim.lr_scheduler import LambdaLR

import penstock
from penstock.checkpoint.opened import LATEST, checkpoints_in
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import Tokens, sequence_count
from penstock.cli.training.optimizer import warmup_cosine
from penstock.cli.training.recipe import Course
from penstock.errors import CheckpointError, ConfigError, one_line

AUTO = "auto"
_MOST_STEPS = 1 << 53
_MOST_SEQUENCES = 1 << 62
#: Options of param groups as the command line calls them.
_OPTION_NAMES = {"initial_lr": "--lr", "weight_decay": "--weight-decay", "betas": "--betas"}


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        step: steps made.
        sequences: sequences that all ranks together have trained on.
    """

    step: int = 0
    sequences: int = 0


class Checkpoints:
    """Saves a run and takes it up again. Every rank makes every call.

    Arguments:
        config: the settings.
        course: what a step is, and how many there are.
        optimizer: the optimizer of the prepared model, with the options that the run was asked for.
        tokens: the text that is trained on; where a run was in it means nothing for another one.

    Attributes:
        changed: what a run that goes on does otherwise than it did before, for people to read; empty where nothing.
    """

    def __init__(self, config: TrainConfig, course: Course, optimizer: penstock.Optimizer, tokens: Tokens) -> None:
        self._config = config
        self._course = course
        self._optimizer = optimizer
        self._text = {
            "seed": config.seed,
            "seq_length": course.seq_length,
            "sequences": sequence_count(len(tokens), course.seq_length),
        }
        # Copies: loading a checkpoint overwrites the options in the groups.
        self._asked = [{**group, "initial_lr": course.lr} for group in optimizer.param_groups]
        for asked in self._asked:
            del asked["params"]
        self.changed = ""

    def resume(self, path: Path | None) -> Position:
        """Go on from a checkpoint, or from the beginning where there is none.

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
            # Before the group is overwritten: what the checkpoint had is known only here.
            for name, option in _OPTION_NAMES.items():
                here, there = _shown(asked[name]), _shown(group.get(name))
                if here != there:
                    differing.setdefault(option, f"{option} {here} instead of {there}")
            group.update(asked)
        self.changed = ", ".join(differing.values())
        return position

    def _check(self, path: Path, extra: dict[str, Any]) -> Position:
        """Hold what a checkpoint says of its run against this run, and return where that run was."""
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
        if step > self._course.steps:
            raise ConfigError(
                f"{path} has made {step} steps, more than --steps {self._course.steps}. Ask for {step} or more, or "
                "name another checkpoint."
            )
        return Position(step, sequences)

    def schedule(self, position: Position) -> LambdaLR:
        """Make what sets the optimizer's learning rates, for a run that is at a position."""
        # LambdaLR multiplies initial_lr, and refuses a position after the first step where a group has none.
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self._course.lr
        factor = warmup_cosine(warmup=self._course.warmup_steps, steps=self._course.steps)
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
        """Wait for the checkpoint that is being written."""
        self._optimizer.synchronize()


def _shown(value: object) -> str:
    """Write an option of a group for people, whatever a checkpoint may hold for one."""
    items = value if isinstance(value, list | tuple) else [value]
    return ",".join(repr(float(item)) if isinstance(item, int | float) else one_line(repr(item), 20) for item in items)


def _counts(value: object, most: int) -> TypeGuard[int]:
    """Tell whether a value of a checkpoint is a whole number from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def checkpoints_of(config: TrainConfig) -> Path:
    """Name the folder of a run's checkpoints."""
    return config.out / "checkpoints"


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """Find the checkpoint that `--resume` names; `None` for a run that begins."""
    if config.resume != AUTO:
        return Path(config.resume) if config.resume else None
    folder = checkpoints_of(config)
    return folder / LATEST if checkpoints_in(folder) else None
