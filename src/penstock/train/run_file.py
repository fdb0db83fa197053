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


# Options of 0.2


#: Options of 0.2 that have another name now.
RENAMED: Mapping[str, str] = {
    "accumulation": "gradient_accumulation_steps",
    "batch_size": "per_device_train_batch_size",
    "chat_template": "chat_template_path",
    "compile": "torch_compile",
    "device_bytes": "max_device_bytes",
    "epochs": "num_train_epochs",
    "host_bytes": "max_host_bytes",
    "jsonl_field": "dataset_text_field",
    "keep": "save_total_limit",
    "log_every": "logging_steps",
    "lr": "learning_rate",
    "schedule": "lr_scheduler_type",
    "seq_length": "max_length",
    "steps": "max_steps",
    "text_field": "dataset_text_field",
    "warmup": "warmup_steps",
}
#: Options of 0.2 that are said otherwise now, or not at all.
OTHERWISE: Mapping[str, str] = {
    "betas": "use --adam_beta1 and --adam_beta2",
    "cache": "the cache is in --output_dir",
    "chunked_loss": "the loss never has whole logits",
    "cp": "use penstock.parallel in a loop of your own",
    "early_stop": "use --load_best_model_at_end, which keeps the best weights",
    "eval_data": "use --dataset_test_split, a split of --data",
    "eval_every": "use --eval_strategy steps --eval_steps",
    "eval_sequences": "use --dataset_test_split, a split of --data",
    "global_batch": "use --gradient_accumulation_steps, which a run that goes on at other ranks adapts",
    "keep_best": "use --load_best_model_at_end",
    "lora": "use --use_peft --lora_r --lora_alpha --lora_target_modules",
    "min_lr": 'use --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate": 0.1}',
    "optimizer_args": "use --adam_epsilon, --optim_args",
    "optimizer_name": "use --optim, or --rule muon, --rule lion",
    "overlap": "updates overlap where they can",
    "pad_vocab_to": "the vocabulary grows as the tokenizer asks",
    "peak_flops": "MFU is that of known devices",
    "precision": "use --bf16, --fp16, or --bf16 false",
    "prompt": "generate with the saved model",
    "recompute": "use --gradient_checkpointing",
    "resume": "a run goes on by itself; --resume_from_checkpoint false starts anew",
    "sample_tokens": "generate with the saved model",
    "save_every": "use --save_steps",
    "truncation": "use --truncation_mode, or --packing_strategy bfd_split",
    **{name: f"use --options {name}=..." for name in _OPTIONS},
}
#: Options that are not named where a file of 0.2 has them: they are read beside others, or need nothing.
_QUIET = ("cache", "chunked_loss", "min_lr", "overlap", "resume", "truncation")


def advice_for(name: str) -> str | None:
    """Say what an option of 0.2 is now; `None` where it was none, or has its name still."""
    return f"use --{RENAMED[name]}" if name in RENAMED else OTHERWISE.get(name)


def _from_before(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read a run file of 0.2.

    Returns:
        The values by field, and the names of options that nothing takes the place of.
    """
    given = {str(name).replace("-", "_"): value for name, value in content.items() if name != "about"}
    given = {name: value for name, value in given.items() if value not in (None, "", [])}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in _VALUES:
            values |= _VALUES[name](value)
        elif name not in OTHERWISE:
            values[RENAMED.get(name, SHORT.get(name, name))] = value
    if values.get("lr_scheduler_type") == "cosine" and given.get("min_lr"):
        kwargs = {"min_lr_rate": given["min_lr"]}
        values |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": kwargs}
    elif values.get("lr_scheduler_type") == "wsd":  # which fell in the last fifth of the steps
        kwargs = {"num_decay_steps": max(1, int(given.get("steps", 0)) // 5), "min_lr_ratio": given.get("min_lr", 0)}
        values |= {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
    options = {name: given[name] for name in _OPTIONS if name in given}
    gone = [name for name in given if name in OTHERWISE and name not in (*_VALUES, *_OPTIONS, *_QUIET)]
    return values | ({"options": options} if options else {}), gone


def _lora(value: str) -> dict[str, Any]:
    pairs = dict(part.partition("=")[::2] for part in value.replace(" ", "").split(","))
    targets = pairs.pop("targets", "all-linear").split("+")
    if pairs.get("base") != "int8":
        pairs.pop("base", None)
    names = {name: name if name == "base" else f"lora_{name}" for name in pairs}
    return {
        "use_peft": True,
        "lora_target_modules": targets,
        "lora_dropout": 0.0,
        **{names[name]: given for name, given in pairs.items()},
    }


def _optimizer(name: str) -> dict[str, Any]:
    return {"rule": name} if name in ("muon", "lion") else {"optim": "adamw_torch" if name == "adamw" else name}


#: What values become that are written otherwise now.
_VALUES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "betas": lambda betas: dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True)),
    "lora": _lora,
    "model": lambda name: {} if name == "tiny" else {"model_name_or_path": name},
    "optimizer_name": _optimizer,
    "packing": lambda packing: {"packing": packing in ("on", True)},
    "plan": lambda plan: {"placement": "auto"} if plan == "auto" else {"plan": plan},
    "precision": lambda precision: {"bf16": precision == "bf16", "fp16": precision == "fp16"},
    "recompute": lambda recompute: {"gradient_checkpointing": recompute in ("on", True)},
    "save_every": lambda steps: {"save_steps": steps} if steps else {"save_strategy": "no"},
}


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
    if "about" in content or (
        BLOCK not in content and any(advice_for(str(name).replace("-", "_")) for name in content)
    ):
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
    parts = {name: value for name, value in said.items() if name not in (*own, "resume_from_checkpoint")}
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
