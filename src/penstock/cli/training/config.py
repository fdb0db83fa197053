"""The settings of one run, which are the options of `penstock train`."""

# ruff: noqa: RUF009 (`option` makes a field, not a default that all settings would share)

import math
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from penstock import Options, Placement
from penstock.cli.options import check_options, option, option_of
from penstock.cli.parse import parse_betas, parse_home, parse_path, parse_share, parse_size_bytes
from penstock.errors import ConfigError

# What every reader of a number takes: tensors' extents, threads, generators of random numbers.
_MOST_COUNT = (1 << 31) - 1
_MOST_THREADS = 1 << 16
_MOST_SEED = (1 << 63) - 1

_STATE = "Where state lives (tiers: device, cpu, nvme) and when it moves"
_LEARNING = "Learning"
_REPORTS = "Measures, reports and checkpoints"

_PRECISIONS = ("auto", "fp32", "bf16")
_OVERLAPS = ("none", "forward", "backward", "auto")

Home = str | dict[str, float]


# Options of a kind: a number of things, and a number of bytes, whose limits are the library's.
_count = partial(option, least=1, most=_MOST_COUNT)
_size = partial(option, panel=_STATE, parse=parse_size_bytes)


def _parse_norm(norm: float, *, option: str) -> float | None:
    """Read a norm to clip to; 0 is none."""
    del option
    return norm or None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of training a causal language model. Every field is an option of the command, in the order of its help.

    Raises:
        ConfigError: a value out of its range. The message names the option of the command line.
    """

    model: str = option("tiny", "A model folder, or random weights of a preset: tiny, small, medium.")
    trust_remote_code: bool = option(False, "Run the model folder's own code, which can do anything you can.")
    data: tuple[str, ...] = option(
        (), "A file, a folder or a glob of .txt .py .md .jsonl. Repeatable.", default_help="Python's own library"
    )
    jsonl_field: str = option("text", "The field of a .jsonl line with the text.")
    out: Path = option(Path("penstock-out"), "Folder for the trained model and metrics.jsonl.", parse=parse_path)
    seed: int = option(0, "Of weights, data order, dropout and sample.", least=0, most=_MOST_SEED)

    stage: int = option(3, "ZeRO stage, 0 to 3.", _STATE)
    params: Home = option("device", "Home of the parameters: a tier, or device=0.5,cpu=0.5.", _STATE, parse=parse_home)
    grads: Home = option("device", "Home of the gradients.", _STATE, parse=parse_home)
    optimizer: Home = option("cpu", "Home of the master weights and optimizer states.", _STATE, parse=parse_home)
    nvme_path: tuple[str, ...] = option((), "A folder of the nvme tier. Repeatable.", _STATE)
    precision: str = option(
        "auto", "fp32, bf16, or auto: bf16 where the hardware computes in it.", _STATE, choices=_PRECISIONS
    )
    overlap: str = option("auto", "When updates run: none, forward, backward, auto.", _STATE, choices=_OVERLAPS)
    activation_checkpointing: bool = option(False, "Recompute activations in backward.", _STATE)
    chunked_loss: bool = option(
        False, "Train without whole logits, which take most of the memory of long sequences.", _STATE
    )
    # Named as in `penstock.Options`, which checks them, and has a default for each that is left out.
    tile_bytes: int | None = _size(None, "Grain of updates and movement, such as 4MiB.")
    live_bytes: int | None = _size(None, "Parameters gathered at once, at most.")
    prefetch_bytes: int | None = _size(None, "Parameters gathered ahead of use, at most.")
    persistent_bytes: int | None = _size(None, "Parameters up to this size stay gathered.")
    pinned_bytes: int | None = _size(None, "Host memory that may be pinned.")
    update_threads: int | None = option(None, "Threads of the update on the host.", _STATE, most=_MOST_THREADS)
    streamed_updates: float | Literal["auto"] | None = option(
        None, "Share of the host's updates that the device does, or auto.", _STATE, parse=parse_share
    )

    lr: float = option(2e-3, "Peak learning rate.", _LEARNING)
    weight_decay: float = option(0.1, "Of parameters with two or more dimensions.", _LEARNING)
    betas: tuple[float, float] = option(
        (0.9, 0.95), "Decay rates of AdamW's two moments.", _LEARNING, parse=parse_betas
    )
    max_grad_norm: float | None = option(
        1.0, "Clip the gradient's norm to this; 0 does not clip.", _LEARNING, parse=_parse_norm
    )
    warmup: int | None = _count(
        None, "Steps of growing learning rate.", _LEARNING, least=0, default_help="a tenth of the steps"
    )
    steps: int = _count(400, "Optimizer steps.", _LEARNING)
    batch_size: int = _count(16, "Sequences per rank and micro-batch.", _LEARNING)
    accumulation: int = _count(1, "Micro-batches per step.", _LEARNING)
    seq_length: int = _count(128, "Tokens per sequence.", _LEARNING, least=2)

    eval_sequences: int = _count(256, "Held-out sequences in all; 0 measures nothing.", _REPORTS, least=0)
    sample_tokens: int = _count(200, "Tokens of the sample at the end; 0 writes none.", _REPORTS, least=0)
    prompt: str = option("", "What the sample continues.", _REPORTS, default_help="held-out text")
    log_every: int = _count(20, "Steps between two reports.", _REPORTS)
    save_every: int = _count(0, "Steps between checkpoints, saved beside training; 0 for none.", _REPORTS, least=0)
    keep: int = _count(2, "Checkpoints that stay.", _REPORTS)
    resume: str = option(
        "", "auto: go on from the newest checkpoint in the out folder, if any. Or a checkpoint's folder.", _REPORTS
    )
    tensorboard: bool = option(False, "Write TensorBoard events into the out folder.", _REPORTS)

    def __post_init__(self) -> None:
        """Refuse values out of range, by the name of their option."""
        check_options(self)
        self._check_learning()
        if not 0 <= self.stage <= 3:
            raise ConfigError(f"--stage {self.stage} is not a ZeRO stage. Use 0, 1, 2 or 3.")
        if self.batch_size * self.seq_length > _MOST_COUNT:
            raise ConfigError(
                f"--batch-size {self.batch_size} of --seq-length {self.seq_length} is more than {_MOST_COUNT} tokens. "
                "Use fewer, and --accumulation for more of them in a step."
            )
        paths = (*self.data, *self.nvme_path, self.model)
        if "" in paths or any("\0" in path for path in (*paths, self.resume)):
            raise ConfigError("--data, --nvme-path, --model and --resume take a path, which is not empty.")

    def _check_learning(self) -> None:
        """Refuse numbers with which nothing is learned."""
        if not self.lr > 0:
            raise ConfigError(f"--lr {self.lr:g} does not train. Use a number above 0.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"--weight-decay {self.weight_decay:g} is negative. Use 0 or more.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"--betas {self.betas[0]:g},{self.betas[1]:g}: use two numbers from 0 to below 1.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"--max-grad-norm {self.max_grad_norm:g} clips everything. Use a number above 0.")
        for name in ("lr", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{option_of(name)} {value:g} is not finite. Use a number.")
        if self.warmup_steps > self.steps:
            raise ConfigError(f"--warmup {self.warmup} is longer than the run of --steps {self.steps}. Shorten it.")

    @property
    def warmup_steps(self) -> int:
        """Count the steps of warm-up: a tenth of all where nothing else was asked for."""
        return self.steps // 10 if self.warmup is None else self.warmup

    @property
    def sizes(self) -> dict[str, Any]:
        """List the fields that `penstock.Options` has too, those that were given."""
        names = [field.name for field in fields(Options)]
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def options(self) -> Options:
        """Make the library's options. Raises `ConfigError` where one is out of range."""
        return Options(**self.sizes)

    def placement(self) -> Placement:
        """Make the library's placement. Raises `ConfigError` where there is no such tier."""
        params, grads, optimizer = (cast("Any", home) for home in (self.params, self.grads, self.optimizer))
        return Placement(params=params, grads=grads, optimizer=optimizer, nvme_path=self.nvme_path or None)

    def to_dict(self) -> dict[str, object]:
        """List the settings as JSON-like values, as `metrics.jsonl` and the checkpoints keep them."""
        of_library = {field.name for field in fields(Options)}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in of_library}
        return values | {"out": str(self.out), "options": self.sizes}
