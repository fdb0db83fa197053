"""The checkpoints of a run: where they lie, what they say of the run, how it goes on from one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch.optim.lr_scheduler import LambdaLR

import penstock
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.best import Best
from penstock.cli.training.learning.schedule import rate_factor
from penstock.cli.training.recipe import Course
from penstock.cli.training.settings.common import MOST_COUNT
from penstock.errors import CheckpointError, ConfigError, one_line
from penstock.integrations.engine_internals import LATEST, checkpoints_in, read_manifest, resolve

AUTO = "auto"
_MOST_STEPS = 1 << 53
_MOST_SEQUENCES = 1 << 62
#: Options of param groups as the command line calls them; others are of --optimizer-args.
_OPTION_NAMES = {"initial_lr": "--lr", "weight_decay": "--weight-decay", "betas": "--betas"}
_OF_SCHEDULE = "lr"  # what the schedule makes of the peak rate in each step


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
        identity: what is read in which order; where a run was in it means nothing for another one.

    Attributes:
        best: the lowest held-out loss so far.
        changed: what a run that goes on does otherwise than it did before, for people to read; empty where nothing.
    """

    def __init__(
        self, config: TrainConfig, course: Course, optimizer: penstock.Optimizer, identity: Mapping[str, Any]
    ) -> None:
        self.best = Best()
        self.changed = ""
        self._ranks = ""  # how many there are otherwise than before
        self._config = config
        self._course = course
        self._optimizer = optimizer
        self._identity = dict(identity)
        self._factor = rate_factor(config, course)
        # Where `--resume auto` goes on: at the beginning, as long as nothing is saved.
        self._saved = Position()
        # Copies: loading a checkpoint overwrites the options in the groups.
        self._asked = [{**group, "initial_lr": course.lr} for group in optimizer.param_groups]
        for asked in self._asked:
            del asked["params"]

    def resume(self, path: Path | None) -> Position:
        """Go on from a checkpoint, or from the beginning where there is none.

        Learning rates and the optimizer's options are those that this run was asked for, as everything else is: the
        schedule is a function of the step, and nothing of it is taken from the checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
            ConfigError: it is of other data, or of the same cut otherwise, or has made more steps than are asked for.
        """
        if path is None:
            return Position()
        self._check_kind(path)
        position = self._check(path, self._optimizer.load(path))
        differing: dict[str, str] = {}
        for group, asked in zip(self._optimizer.param_groups, self._asked, strict=True):
            # Before the group is overwritten: what the checkpoint had is known only here.
            for name in asked.keys() - {_OF_SCHEDULE}:
                here, there = _shown(asked[name]), _shown(group.get(name))
                if here != there:
                    option = _OPTION_NAMES.get(name, f"--optimizer-args {name}")
                    differing.setdefault(option, f"{option} {here} instead of {there}")
            group.update(asked)
        said = [self._ranks] if self._ranks else []
        self.changed = ", ".join(said + [differing[option] for option in sorted(differing, key=_order)])
        if self._config.resume == AUTO:  # of several others, the next one might take another
            self._saved = position
        return position

    def _check_kind(self, path: Path) -> None:
        """Refuse a checkpoint of adapters for a whole model, and of a whole model for adapters, by that name."""
        try:
            extra: Any = read_manifest(resolve(path)).extra
        except CheckpointError:  # which `load` says, on all ranks
            return
        config = extra.get("config") if isinstance(extra, dict) else None
        was = config.get("lora") if isinstance(config, dict) else None
        if isinstance(was, str) and bool(was) != bool(self._config.lora):
            kinds = ("of a whole model", "of adapters")
            raise ConfigError(
                f"{path} is a checkpoint {kinds[bool(was)]}, and this run is {kinds[not was]}. "
                f"{'Leave --lora out' if self._config.lora else 'Add --lora'}, or use another --out."
            )

    def _check(self, path: Path, extra: dict[str, Any]) -> Position:
        """Hold what a checkpoint says of its run against this run, and return where that run was."""
        step, sequences, data = extra.get("step"), extra.get("sequences"), extra.get("data")
        best = Best.of(extra["best"]) if "best" in extra else Best()
        if not (_counts(step, _MOST_STEPS) and _counts(sequences, _MOST_SEQUENCES) and isinstance(data, dict) and best):
            raise CheckpointError(
                f"{path} is not of this penstock train: its steps are {one_line(repr(step), 40)}, its sequences "
                f"{one_line(repr(sequences), 40)}. Name one that is.",
                field="extra",
            )
        for name in (*self._identity, *(name for name in data if name not in self._identity)):
            was, value = data.get(name), self._identity.get(name)
            if not _same(was, value):
                raise ConfigError(
                    f"{path} was trained on other data: {one_line(str(name), 40)} was {one_line(repr(was), 40)} and is "
                    f"{one_line(repr(value), 40)}. Use the same --data, --seed and --seq-length, or another --out."
                )
        if step > self._course.steps:
            asked = f"--steps {self._course.steps}"
            if self._config.steps is None:
                asked = f"the {self._course.steps} of this run"
            raise ConfigError(
                f"{path} has made {step} steps, more than {asked}. Ask for {step} or more, or name another checkpoint."
            )
        self.best = best
        was = extra.get("world_size")
        if _counts(was, _MOST_STEPS) and was != self._course.world_size:
            course = self._course
            before = extra.get("config")
            shared = self._config.cp > 1 or (isinstance(before, dict) and not _same(before.get("cp", 1), 1))
            who = "data-parallel groups" if shared else "ranks"
            self._ranks = (
                f"{course.world_size} instead of {was} {who} (steps of {course.per_step} sequences: --batch-size "
                f"{course.batch_size} --accumulation {course.accumulation})"
            )
        return Position(step, sequences)

    def schedule(self, position: Position) -> LambdaLR:
        """Make what sets the optimizer's learning rates, for a run that is at a position."""
        # LambdaLR multiplies initial_lr, and refuses a position after the first step where a group has none.
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self._course.lr
        return LambdaLR(self._optimizer, self._factor, last_epoch=position.step - 1)

    def save(self, position: Position, *, blocking: bool) -> None:
        """Save the run as it is now, and prune what is older than the newest `config.keep`.

        Nothing is done where the run is as it was saved, or at its beginning.
        """
        if position != self._saved:
            path = checkpoints_of(self._config) / f"step-{position.step:08d}"
            self._optimizer.save(
                path,
                extra=self._extra(position),
                blocking=blocking,
                keep=self._config.keep,
                frozen=not self._config.lora,
            )
            self._saved = position

    def save_best(self, position: Position) -> None:
        """Save the run as it is now beside training, as the one with the lowest held-out loss."""
        self._optimizer.save(
            best_of(self._config), extra=self._extra(position), blocking=False, frozen=not self._config.lora
        )

    def _extra(self, position: Position) -> dict[str, Any]:
        """List what a checkpoint says of its run."""
        return {
            "step": position.step,
            "sequences": position.sequences,
            "per_step": self._course.per_step,
            "world_size": self._course.world_size,
            "data": self._identity,
            "best": self.best.to_dict(),
            "config": self._config.to_dict(),
        }

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._optimizer.synchronize()  # site train.checkpoint_saved


def _order(option: str) -> tuple[int, str]:
    """Sort options as `_OPTION_NAMES` does, others behind them."""
    names = list(_OPTION_NAMES.values())
    return (names.index(option) if option in names else len(names), option)


def _shown(value: object) -> str:
    """Write an option of a group for people, whatever a checkpoint may hold for one."""
    items = value if isinstance(value, list | tuple) else [value]
    return ",".join(
        repr(float(item)) if isinstance(item, int | float) and not isinstance(item, bool) else one_line(repr(item), 20)
        for item in items
    )


def _same(was: object, value: object) -> bool:
    """Compare JSON values of a checkpoint with ours: a true is no 1, and no tensor is compared at all."""
    if isinstance(value, dict):
        return isinstance(was, dict) and was.keys() == value.keys() and all(_same(was[k], value[k]) for k in value)
    if isinstance(value, list | tuple):
        if not isinstance(was, list | tuple) or len(was) != len(value):
            return False
        return all(_same(there, here) for there, here in zip(was, value, strict=True))
    return type(was) is type(value) and was == value


def _counts(value: object, most: int) -> TypeGuard[int]:
    """Tell whether a value of a checkpoint is a whole number from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def checkpoints_of(config: TrainConfig) -> Path:
    """Name the folder of a run's checkpoints."""
    return config.out / "checkpoints"


def best_of(config: TrainConfig) -> Path:
    """Name the checkpoint with the lowest held-out loss of a run."""
    return config.out / "best"


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """Find the checkpoint that `--resume` names; `None` for a run that begins."""
    if config.resume != AUTO:
        return Path(config.resume) if config.resume else None
    folder = checkpoints_of(config)
    return folder / LATEST if checkpoints_in(folder) else None


def per_step_before(config: TrainConfig) -> int | None:
    """Look up how many sequences a step has of the run that these settings go on with, on however many ranks.

    Returns:
        `None` where it begins, where `--global-batch` says it, where the settings of a rank are others than they were,
        and where the checkpoint does not say it or is damaged, which `Checkpoints.resume` tells.
    """
    path = checkpoint_to_resume(config)
    if path is None or config.global_batch is not None:
        return None
    try:
        extra: Any = read_manifest(resolve(path)).extra
    except CheckpointError:
        return None
    was, per_step = (extra.get(name) if isinstance(extra, dict) else None for name in ("config", "per_step"))
    names = ("model", "batch_size", "accumulation", "global_batch")
    if not isinstance(was, dict) or not all(_same(was.get(name), getattr(config, name)) for name in names):
        return None
    return per_step if _counts(per_step, MOST_COUNT) and per_step else None
