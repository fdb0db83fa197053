"""The settings of one training run, as a value. The command line is a thin layer over this class."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.errors import ConfigError

Home = str | dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run of a causal language model.

    Arguments:
        model: a folder that `from_pretrained` reads, or the name of a preset.
        trust_remote_code: run the code of a folder whose model or tokenizer is none of transformers' own.
        data: files, folders and globs; empty for the text of Python's own standard library.
        jsonl_field: the field of a `.jsonl` line that holds the text.
        out: folder of the trained model and of `metrics.jsonl`; made when missing.
        tensorboard: write TensorBoard events to `out`/tensorboard too.
        stage: ZeRO stage, 0 to 3.
        params: home of the parameters, as in `penstock.Placement`; so are `grads` and `optimizer`.
        grads: home of the gradients.
        optimizer: home of the master weights and the optimizer's states.
        nvme_path: folders of the nvme tier.
        precision: compute dtype; "auto" is bf16 where the hardware computes in it, fp32 elsewhere.
        overlap: when updates run, as in `penstock.prepare`.
        activation_checkpointing: recompute activations in backward instead of keeping them.
        chunked_loss: compute the loss in training without whole logits.
        options: `penstock.Options` by name, those that were asked for.
        lr: peak learning rate.
        weight_decay: of the parameters with two or more dimensions; the others get none.
        betas: decay rates of AdamW's two moments.
        max_grad_norm: clip the gradient's norm over all ranks to this; `None` does not clip.
        warmup: steps over which the learning rate grows to its peak; `None` for a tenth of the steps.
        steps: optimizer steps.
        batch_size: sequences per rank and micro-batch.
        accumulation: micro-batches per step.
        seq_length: tokens per sequence.
        seed: of the initial weights, the order of the data, dropout and the sample.
        eval_sequences: held-out sequences in all, over every rank; 0 measures nothing.
        sample_tokens: tokens of the sample at the end; 0 writes none.
        prompt: what the sample continues; empty for the beginning of the held-out text.
        log_every: steps between two lines of the display and of `metrics.jsonl`.
        save_every: steps between two checkpoints in `out`/checkpoints, written beside training; 0 saves none, unless
            the run is asked to end.
        keep: checkpoints that stay, the newest.
        resume: "auto" goes on from the newest checkpoint in `out`/checkpoints, where there is one; or a checkpoint's
            folder; empty begins anew.

    Raises:
        ConfigError: a value out of its range. The message names the option of the command line.
    """

    model: str = "tiny"
    trust_remote_code: bool = False
    data: tuple[str, ...] = ()
    jsonl_field: str = "text"
    out: Path = Path("penstock-out")
    tensorboard: bool = False

    stage: int = 3
    params: Home = "device"
    grads: Home = "device"
    optimizer: Home = "cpu"
    nvme_path: tuple[str, ...] = ()
    precision: str = "auto"
    overlap: str = "auto"
    activation_checkpointing: bool = False
    chunked_loss: bool = False
    options: tuple[tuple[str, int], ...] = ()

    lr: float = 2e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0
    warmup: int | None = None
    steps: int = 400

    batch_size: int = 16
    accumulation: int = 1
    seq_length: int = 128
    seed: int = 0

    eval_sequences: int = 256
    sample_tokens: int = 200
    prompt: str = ""
    log_every: int = 20
    save_every: int = 0
    keep: int = 2
    resume: str = ""

    def __post_init__(self) -> None:
        """Refuse values out of range, by the name of their option."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{option_of(name)} {value} is too small. Use {least} or more.")
            most = _MOST_SEED if name == "seed" else _MOST_COUNT
            if value is not None and value > most:
                raise ConfigError(f"{option_of(name)} is too large. Use {most} or less.")
        if not 0 <= self.stage <= 3:
            raise ConfigError(f"--stage {self.stage} is not a ZeRO stage. Use 0, 1, 2 or 3.")
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
        if self.batch_size * self.seq_length > _MOST_COUNT:
            raise ConfigError(
                f"--batch-size {self.batch_size} of --seq-length {self.seq_length} is more than {_MOST_COUNT} tokens. "
                "Use fewer, and --accumulation for more of them in a step."
            )
        paths = (*self.data, *self.nvme_path, self.model)
        if "" in paths or any("\0" in path for path in (*paths, self.resume)):
            raise ConfigError("--data, --nvme-path, --model and --resume take a path, which is not empty.")
        threads = dict(self.options).get("update_threads")
        if threads is not None and threads > _MOST_THREADS:
            raise ConfigError(f"--update-threads is too large. Use {_MOST_THREADS} or less.")
        if self.warmup_steps > self.steps:
            raise ConfigError(f"--warmup {self.warmup} is longer than the run of --steps {self.steps}. Shorten it.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{option_of(name)} {getattr(self, name)!r}: use one of {', '.join(choices)}.")

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up, the default worked out."""
        return self.steps // 10 if self.warmup is None else self.warmup

    def to_dict(self) -> dict[str, object]:
        """The settings as JSON-like values, for the first line of `metrics.jsonl`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"out": str(self.out), "options": dict(self.options)}


def option_of(name: str) -> str:
    """The command line's name of a setting: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


#: What every reader of a number takes: tensors' extents, generators of random numbers.
_MOST_COUNT = (1 << 31) - 1
_MOST_THREADS = 1 << 16
_MOST_SEED = (1 << 63) - 1
_LEAST = {
    "warmup": 0,
    "steps": 1,
    "batch_size": 1,
    "accumulation": 1,
    "seq_length": 2,
    "seed": 0,
    "eval_sequences": 0,
    "sample_tokens": 0,
    "log_every": 1,
    "save_every": 0,
    "keep": 1,
}
_CHOICES = {"precision": ("auto", "fp32", "bf16"), "overlap": ("none", "forward", "backward", "auto")}
