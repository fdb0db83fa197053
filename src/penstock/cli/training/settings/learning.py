"""How the model learns: its optimizer, the learning rate over time, and what a step is."""

import math
from dataclasses import dataclass

from penstock.cli.options import option, option_of
from penstock.cli.parse import parse_betas, parse_warmup
from penstock.cli.training.settings.common import count
from penstock.errors import ConfigError

_LEARNING = "Learning"
#: Of torch, by the names that people give them; lion and muon (with adamw for what is no matrix) are penstock's.
OPTIMIZERS = (
    *("adamw", "adam", "sgd", "adagrad", "lion", "muon", "rmsprop"),
    *("adadelta", "adamax", "nadam", "radam", "asgd", "rprop"),
)
#: transformers' names, and those that people use for two of them.
SCHEDULES = (
    *("cosine", "linear", "wsd", "constant", "constant_with_warmup", "warmup_stable_decay", "cosine_with_min_lr"),
    *("cosine_with_restarts", "polynomial", "inverse_sqrt"),
)


def _parse_norm(norm: float, *, option: str) -> float | None:
    """Read a norm to clip to; 0 is none."""
    del option
    return norm or None


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """The optimizer and its options, the learning rate from step to step, and how many steps of what size."""

    optimizer_name: str = option("adamw", "The optimizer.", _LEARNING, choices=OPTIMIZERS)
    optimizer_args: tuple[str, ...] = option(
        (), "Its other arguments, as torch calls them: eps=1e-6 momentum=0.9.", _LEARNING, many=True
    )
    lr: float | None = option(
        None,
        "Peak learning rate.",
        _LEARNING,
        default_help="2e-3 for a preset, 2e-5 for a folder, 2e-4 with --lora",
    )
    betas: tuple[float, float] | None = option(
        None, "Decay rates of two moments.", _LEARNING, parse=parse_betas, default_help="0.9,0.95 for adamw and muon"
    )
    weight_decay: float | None = option(
        None, "Of matrices; norms and biases have none.", _LEARNING, default_help="0.1 for adamw, lion and muon, else 0"
    )
    max_grad_norm: float | None = option(
        1.0, "Clip the gradient's norm to this; 0 does not clip.", _LEARNING, parse=_parse_norm, none=0
    )
    schedule: str = option("cosine", "The learning rate after the warmup.", _LEARNING, choices=SCHEDULES)
    min_lr: float = option(0.1, "Where cosine and wsd end, as a share of --lr.", _LEARNING)
    warmup: float | None = option(
        None,
        "Steps of growing learning rate; below 1, their share of all.",
        _LEARNING,
        parse=parse_warmup,
        default_help="a tenth of the steps",
    )
    steps: int | None = count(
        None, "Optimizer steps.", _LEARNING, default_help="400 for a preset, else --epochs", rivals=("epochs",)
    )
    epochs: float | None = option(
        None,
        "How often everything is read, in place of --steps.",
        _LEARNING,
        default_help="1 for a folder",
        rivals=("steps",),
    )
    batch_size: int | None = count(
        None, "Sequences per rank and micro-batch.", _LEARNING, default_help="16 for a preset, 4 for a folder"
    )
    accumulation: int | None = count(
        None,
        "Micro-batches per step.",
        _LEARNING,
        default_help="1, or what --global-batch needs",
        rivals=("global_batch",),
    )
    global_batch: int | None = count(
        None,
        "Sequences per step, of all ranks.",
        _LEARNING,
        default_help="--batch-size x --accumulation x ranks / --cp",
        rivals=("accumulation",),
    )

    def check_learning(self) -> None:
        """Refuse numbers with which nothing is learned, and numbers that contradict each other."""
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"--lr {self.lr:g} does not train. Use a number above 0.")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise ConfigError(f"--weight-decay {self.weight_decay:g} is negative. Use 0 or more.")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"--betas {self.betas[0]:g},{self.betas[1]:g}: use two numbers from 0 to below 1.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"--max-grad-norm {self.max_grad_norm:g} clips everything. Use a number above 0.")
        if not 0 <= self.min_lr <= 1:
            raise ConfigError(f"--min-lr {self.min_lr:g} is a share of --lr. Use a number from 0 to 1.")
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"--epochs {self.epochs:g} trains on nothing. Use a number above 0.")
        for name in ("lr", "weight_decay", "max_grad_norm", "epochs"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{option_of(name)} {value:g} is not finite. Use a number.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"--steps {self.steps} and --epochs {self.epochs:g} both say how long. Use one of them.")
        if self.steps is not None and self.warmup is not None and self.warmup > self.steps:
            raise ConfigError(f"--warmup {self.warmup:g} is longer than the run of --steps {self.steps}. Shorten it.")
