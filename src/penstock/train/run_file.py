"""Files of a run: a YAML file of TRL's with a block `penstock:`, the `run.yaml` of a run, run files of 0.2.

Nothing of TRL is imported here: what a file names decides whether the hub is asked, before any library is.
"""

import os
import platform
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, one_line, shown
from penstock.files import check_own, read_mapping, write_whole, yaml_of

NAME = "run.yaml"
BLOCK = "penstock"
#: Short names of three fields, typed and in files.
SHORT: Mapping[str, str] = {"model": "model_name_or_path", "data": "dataset_name", "out": "output_dir"}
_PACKAGES = ("penstock", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "tokenizers")
_OPTIONS = (
    *("tile_bytes", "live_bytes", "prefetch_bytes", "persistent_bytes", "pinned_bytes", "update_threads"),
    *("streamed_updates", "state_dtype", "gather_format", "reduce_format", "secondary_shard", "timeout_s"),
)
_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop"}
_LORA = {"r": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "base": "base"}

#: Options of 0.2 that are not named where a file has them: they are read beside others, or need nothing.
_READ_ELSEWHERE = ("cache", "chunked_loss", "min_lr", "overlap", "resume", "truncation")

Reader = Callable[[Any], Mapping[str, Any]]


# Options of 0.2


def _as(name: str) -> Reader:
    """Make what reads an option that has another name now."""
    return lambda value: {name: value}


def _nothing(value: Any) -> Mapping[str, Any]:
    del value
    return {}


def _lora(value: Any) -> Mapping[str, Any]:
    pairs = dict(part.partition("=")[::2] for part in str(value).replace(" ", "").split(","))
    found: dict[str, Any] = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0}
    found |= {_LORA[name]: given for name, given in pairs.items() if name in _LORA and given not in ("auto", "bf16")}
    if "targets" in pairs:
        found["lora_target_modules"] = pairs["targets"].split("+")
    return found


def _optimizer(value: Any) -> Mapping[str, Any]:
    return {"rule": value} if value in ("muon", "lion") else {"optim": _OPTIMIZERS.get(str(value), value)}


def _truncation(value: Any) -> Mapping[str, Any]:
    return {"truncation_mode": {"left": "keep_end", "right": "keep_start"}[value]} if value in ("left", "right") else {}


#: Options of 0.2: what says the same now, and what a run file's value becomes.
RENAMED: Mapping[str, tuple[str, Reader]] = {
    "accumulation": ("use --gradient_accumulation_steps", _as("gradient_accumulation_steps")),
    "batch_size": ("use --per_device_train_batch_size", _as("per_device_train_batch_size")),
    "betas": ("use --adam_beta1 and --adam_beta2", lambda v: dict(zip(("adam_beta1", "adam_beta2"), v, strict=True))),
    "cache": ("the cache is in --output_dir", _nothing),
    "chat_template": ("use --chat_template_path", _as("chat_template_path")),
    "chunked_loss": ("the loss never has whole logits", _nothing),
    "compile": ("use --torch_compile", _as("torch_compile")),
    "cp": ("use penstock.parallel in a loop of your own", _nothing),
    "device_bytes": ("use --max_device_bytes", _as("max_device_bytes")),
    "early_stop": ("use --load_best_model_at_end, which keeps the best weights", _nothing),
    "epochs": ("use --num_train_epochs", _as("num_train_epochs")),
    "eval_data": ("use --dataset_test_split, a split of --data", _nothing),
    "eval_every": ("use --eval_strategy steps --eval_steps", _nothing),
    "eval_sequences": ("use --dataset_test_split, a split of --data", _nothing),
    "global_batch": ("use --gradient_accumulation_steps, which a run that goes on at other ranks adapts", _nothing),
    "host_bytes": ("use --max_host_bytes", _as("max_host_bytes")),
    "jsonl_field": ("use --dataset_text_field", _as("dataset_text_field")),
    "keep": ("use --save_total_limit", _as("save_total_limit")),
    "keep_best": ("use --load_best_model_at_end", _nothing),
    "log_every": ("use --logging_steps", _as("logging_steps")),
    "lora": ("use --use_peft --lora_r 16 --lora_alpha 32", _lora),
    "lr": ("use --learning_rate", _as("learning_rate")),
    "min_lr": ('use --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate": 0.1}', _nothing),
    "optimizer_args": ("use --adam_epsilon, --optim_args", _nothing),
    "optimizer_name": ("use --optim, or --rule muon, --rule lion", _optimizer),
    "overlap": ("updates overlap where they can", _nothing),
    "pad_vocab_to": ("the vocabulary grows as the tokenizer asks", _nothing),
    "peak_flops": ("MFU is that of known devices", _nothing),
    "precision": ("use --bf16, --fp16, or --bf16 false", lambda v: {"bf16": v == "bf16", "fp16": v == "fp16"}),
    "prompt": ("generate with the saved model", _nothing),
    "recompute": ("use --gradient_checkpointing", lambda v: {"gradient_checkpointing": v in ("on", True)}),
    "resume": ("a run goes on by itself; --resume_from_checkpoint false starts anew", _nothing),
    "sample_tokens": ("generate with the saved model", _nothing),
    "save_every": ("use --save_steps", lambda v: {"save_steps": v} if v else {"save_strategy": "no"}),
    "schedule": ("use --lr_scheduler_type", _as("lr_scheduler_type")),
    "seq_length": ("use --max_length", _as("max_length")),
    "steps": ("use --max_steps", _as("max_steps")),
    "text_field": ("use --dataset_text_field", _as("dataset_text_field")),
    "truncation": ("use --truncation_mode, or --packing_strategy bfd_split", _truncation),
    "warmup": ("use --warmup_steps", _as("warmup_steps")),
    **{name: (f"use --options {name}=...", _as(name)) for name in _OPTIONS},
}
#: Options of 0.2 that have the same name, and other values.
_OTHER_VALUES: Mapping[str, Reader] = {
    "packing": lambda value: {"packing": value in ("on", True)},
    "plan": lambda value: {"placement": "auto"} if value == "auto" else {"plan": value},
    "model": lambda value: {} if value == "tiny" else {"model_name_or_path": value},
}


def _from_before(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read a run file of 0.2.

    Returns:
        The values by field, and the names of options that nothing takes the place of.
    """
    values: dict[str, Any] = {}
    gone: list[str] = []
    given = {str(name).replace("-", "_"): value for name, value in content.items() if name != "about"}
    for name, value in given.items():
        if value in (None, "", []):
            continue
        reader = RENAMED[name][1] if name in RENAMED else _OTHER_VALUES.get(name, _as(SHORT.get(name, name)))
        found = reader(value)
        values |= found
        if not found and name in RENAMED and name not in _READ_ELSEWHERE:
            gone.append(name)
    kind, lowest = values.get("lr_scheduler_type"), given.get("min_lr", 0)
    if kind in ("cosine", "cosine_with_min_lr") and lowest:
        values |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": lowest}}
    elif kind in ("wsd", "warmup_stable_decay"):
        steps, warmup = int(given.get("steps") or 0), given.get("warmup") or 0
        decay = max(1, min(steps // 5, int(steps - (warmup if warmup >= 1 else warmup * steps))))
        kwargs = {"num_decay_steps": decay, "min_lr_ratio": lowest}
        values |= {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    options = {name: values.pop(name) for name in _OPTIONS if name in values}
    return values | ({"options": options} if options else {}), gone


# Files


def read_run_file(path: str | os.PathLike[str], say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Read a file of options, by field. Its block `env:` is put into the environment, as TRL does.

    Arguments:
        path: the file.
        say: is told of what a file of 0.2 says that nothing takes the place of.

    Raises:
        ConfigError: it cannot be read, or says a thing twice.
    """
    content = read_mapping(Path(path))
    if "about" in content or (BLOCK not in content and any(str(n).replace("-", "_") in RENAMED for n in content)):
        values, gone = _from_before(content)
        say(f"{path} is a run file of 0.2, which the next release does not read; {NAME} of this run takes its place")
        if gone:
            say(f"nothing takes the place of {', '.join(gone)} in {path}")
        return values
    for name, value in _block(content, "env", path).items():
        os.environ[str(name)] = str(value)
    block = _block(content, BLOCK, path)
    placement = block.get("placement")
    if isinstance(placement, Mapping):  # as arguments of `prepare` are written
        block = {name: value for name, value in block.items() if name != "placement"} | dict(placement)
    values = {}
    for key, value in (*content.items(), *block.items()):
        name = SHORT.get(str(key), str(key)).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path} has {shown(key)} twice. Leave one of them out.")
        values[name] = value
    return values


def _block(content: dict[str, Any], name: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Take a block out of a file's content."""
    block = content.pop(name, None) or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{path}: {name} is {shown(block)}. Write a mapping below it.")
    return dict(block)


def write_run_file(
    out: Path, said: Mapping[str, Any], own: Collection[str], *, argv: Sequence[str], world_size: int
) -> None:
    """Write what a run is, so that `--config` of the file makes it again. A file that was there is replaced as a whole.

    Arguments:
        out: the folder.
        said: the values that are no defaults, by field.
        own: the fields that are Penstock's.
        argv: the words behind `penstock train`.
        world_size: how many ranks there are.

    Raises:
        ConfigError: it cannot be written.
    """
    parts = {name: value for name, value in said.items() if name not in own}
    block = {name: value for name, value in said.items() if name in own and name != "dry_run"}
    head = [
        "penstock train --config of this file makes the run again. What is typed beside it wins.",
        f"made by: {one_line(shlex.join(['penstock', 'train', *argv]), 4000)}",
        f"with: {', '.join(_versions())}; ranks: {world_size}",
    ]
    text = "".join(f"# {line}\n" for line in head) + (yaml_of(parts) if parts else "")
    text += yaml_of({BLOCK: block}) if block else ""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(check_own(out / NAME), text)
    except OSError as error:
        raise ConfigError(f"{out / NAME} cannot be written: {error.strerror}. Use another --output_dir.") from error


def _versions() -> list[str]:
    """List the versions of Python and of the libraries that compute."""
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def checkpoints_of(out: Path) -> list[Path]:
    """List the checkpoints of a run, the oldest first."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in out.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, number in numbers.items() if number.isdigit()), key=lambda path: int(numbers[path]))
