"""The numbers of a run, every one of them known: what was asked for, and what follows from it.

`recipe_for` knows them before the data is read, but for how long the run is; `Recipe.over` knows that too.
"""

import math
from dataclasses import dataclass

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.settings.common import MOST_COUNT
from penstock.errors import ConfigError
from penstock.integrations.huggingface import PRESETS

PRESET_SEQ_LENGTH, FOLDER_SEQ_LENGTH = 128, 1024
PRESET_LR, FOLDER_LR, LORA_LR = 2e-3, 2e-5, 2e-4
PRESET_STEPS = 400
PRESET_BATCH_SIZE, FOLDER_BATCH_SIZE = 16, 4
WARMUP_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a step is.

    Attributes:
        seq_length: tokens of a sequence, at most.
        lr: the peak learning rate.
        batch_size: sequences of a micro-batch of one rank.
        accumulation: micro-batches of a step.
        world_size: ranks that read rows of their own.
    """

    seq_length: int
    lr: float
    batch_size: int
    accumulation: int
    world_size: int

    @property
    def per_step(self) -> int:
        """Count the sequences of a step, of all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def over(self, config: TrainConfig, epoch_count: int) -> "Course":
        """Say how long the run is, with the number of sequences that an epoch has.

        Raises:
            ConfigError: the warmup is longer than the run, or the run has no step.
        """
        steps = config.steps
        if steps is None:
            epochs = config.epochs if config.epochs is not None else 1.0
            steps = max(1, math.ceil(epochs * epoch_count / self.per_step))
            if config.epochs is None and config.model in PRESETS:
                steps = PRESET_STEPS
        warmup = WARMUP_SHARE if config.warmup is None else config.warmup
        # Rounded up, as transformers' Trainer does.
        warmup_steps = math.ceil(warmup * steps) if warmup < 1 else int(warmup)
        if warmup_steps > steps:
            raise ConfigError(f"--warmup {warmup:g} is longer than the run of {steps} steps. Shorten it.")
        return Course(**vars(self), steps=steps, warmup_steps=warmup_steps, epoch_count=epoch_count)


@dataclass(frozen=True, kw_only=True)
class Course(Recipe):
    """What a step is, and how many there are.

    Attributes:
        steps: optimizer steps of the whole run.
        warmup_steps: those of them in which the learning rate grows.
        epoch_count: sequences of an epoch.
    """

    steps: int
    warmup_steps: int
    epoch_count: int

    @property
    def epochs(self) -> float:
        """Say how often everything is read."""
        return self.steps * self.per_step / self.epoch_count


def recipe_for(config: TrainConfig, *, positions: int | None, world_size: int, per_step: int | None = None) -> Recipe:
    """Work out what a step is.

    Arguments:
        config: the settings.
        positions: how many positions the model knows; `None` where it does not say.
        world_size: how many ranks read rows of their own.
        per_step: sequences of a step in the run that goes on, which it keeps; `None` for what the settings say.

    Raises:
        ConfigError: batch, accumulation and global batch contradict each other, or are more than there can be; or the
            ranks cannot share the steps of the run that goes on.
    """
    is_preset = config.model in PRESETS
    lr = config.lr
    if lr is None:
        lr = LORA_LR if config.lora else PRESET_LR if is_preset else FOLDER_LR
    seq_length = seq_length_for(config.model, config.seq_length, positions=positions)
    sharing = "ranks" if config.cp == 1 else f"data-parallel groups of {config.cp} ranks"
    batch_size, accumulation = _batch(
        config, world_size, sharing, PRESET_BATCH_SIZE if is_preset else FOLDER_BATCH_SIZE
    )
    if per_step is not None and batch_size * accumulation * world_size != per_step:
        batch_size, accumulation = _kept(per_step, batch_size, world_size, sharing)
    if batch_size * seq_length > MOST_COUNT:
        raise ConfigError(
            f"--batch-size {batch_size} of --seq-length {seq_length} is more than {MOST_COUNT} tokens. Use fewer, and "
            "--accumulation for more of them in a step."
        )
    return Recipe(seq_length=seq_length, lr=lr, batch_size=batch_size, accumulation=accumulation, world_size=world_size)


def seq_length_for(model: str, wanted: int | None, *, positions: int | None) -> int:
    """Say how long a sequence is: as asked for, or as the model allows and people can wait for."""
    if wanted is not None:
        return wanted
    return PRESET_SEQ_LENGTH if model in PRESETS else min(FOLDER_SEQ_LENGTH, positions or FOLDER_SEQ_LENGTH)


def _batch(config: TrainConfig, world_size: int, sharing: str, default: int) -> tuple[int, int]:
    """Work out the size of a micro-batch and how many of them a step has."""
    size, accumulation, whole = config.batch_size, config.accumulation, config.global_batch
    if whole is None:
        return size or default, accumulation or 1
    of_rank = whole // world_size
    if size is None:
        # As few micro-batches as the default size allows, unless their number is given.
        fitting = (n for n in range(min(default, of_rank), 0, -1) if of_rank % n == 0)
        size = of_rank // accumulation if accumulation else next(fitting, 0)
    if accumulation is None:
        accumulation = of_rank // size if size else 0
    if not whole or size * accumulation * world_size != whole:
        raise ConfigError(
            f"--global-batch {whole} is not --batch-size {size or 1} x --accumulation {accumulation or 1} x "
            f"{world_size} {sharing}. Leave one of the first three out, or make them agree."
        )
    return size, accumulation


def _kept(per_step: int, most: int, world_size: int, sharing: str) -> tuple[int, int]:
    """Divide the steps of a run that goes on among another number of ranks, in micro-batches of at most `most`."""
    of_rank, rest = divmod(per_step, world_size)
    if rest:
        kind = sharing.partition(" of ")[0]
        raise ConfigError(
            f"The run that --resume goes on with has {per_step} sequences in a step, which {world_size} {sharing} "
            f"cannot share. Use a number of {kind} that divides {per_step}, or --global-batch for steps of another "
            "size."
        )
    size = next(n for n in range(min(most, of_rank), 0, -1) if of_rank % n == 0)
    return size, of_rank // size
