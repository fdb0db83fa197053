"""What `TrainingArguments` and Penstock are both told: one precision, one clipping, one way to shard.

Checked when the trainer is made, before anything is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.integrations import _common
from penstock.integrations._common import ComputePrecision
from penstock.integrations.accelerate.settings import PRECISIONS

#: Names of `TrainingArguments(optim=)` whose class Penstock has a rule for.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

_OF_DTYPES: Mapping[torch.dtype, ComputePrecision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LION = (
    "Give Trainer optimizer_cls_and_kwargs=(penstock.optim.Lion, {'lr': ..., 'betas': ...}), and keep its state on the "
    "tier that placement= says"
)
_SMALL = (
    "Use 'adamw_torch' with penstock's options={'state_dtype': 'bf16'}, or placement={'optimizer': 'cpu'}, which costs "
    "no device memory"
)
_PAGED = "Use 'adamw_torch' with penstock's placement={'optimizer': 'cpu'} or 'nvme', which is what paging is for"
_HINTS: Mapping[str, str] = {"lion": _LION, "paged": _PAGED, "8bit": _SMALL, "4bit": _SMALL, "bnb": _SMALL}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `prepare` that Trainer has a setting of its own for.

    Raises:
        ConfigError: names the setting.
    """
    if arguments.get("max_grad_norm") is not None:
        raise ConfigError(
            f"max_grad_norm={arguments['max_grad_norm']} beside Trainer, which clips by itself, to 1.0 unless said. "
            "Use TrainingArguments(max_grad_norm=) in its place; 0 does not clip."
        )
    # A plan that is in a file need not be on every rank: that one the engine refuses, when it is asked for a norm.
    planned = getattr(arguments.get("plan"), "overlap", None)
    if "backward" in (arguments.get("overlap"), planned):
        raise ConfigError(
            "overlap='backward': Trainer asks for the norm of all gradients before each step, and updates would have "
            f"begun. {'Plan again with' if planned == 'backward' else 'Use'} overlap='forward'."
        )


def check_training(args: Any, elsewhere: Mapping[str, Any]) -> None:
    """Refuse settings of a run with which something else would shard, cast or update the model.

    Arguments:
        args: transformers' `TrainingArguments`.
        elsewhere: some of its fields, as a file says them.

    Raises:
        ConfigError: names the setting, and what to say instead.
    """
    if args.deepspeed is not None:
        raise ConfigError(
            "TrainingArguments(deepspeed=): DeepSpeed would train the model. Leave it out, and use "
            "trainer_class(Trainer, deepspeed='ds.json'), which says the same to Penstock; `penstock convert-config` "
            "prints it."
        )
    if args.fsdp:
        raise ConfigError(
            "TrainingArguments(fsdp=): FSDP would shard the model a second time. Leave it out; `penstock "
            "convert-config` says what an FSDP configuration of accelerate is here."
        )
    if getattr(args, "parallelism_config", None) is not None:
        raise ConfigError("TrainingArguments(parallelism_config=): Penstock shards the model alone. Leave it out.")
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ConfigError(
                f"TrainingArguments({name}=True) casts the model for evaluation, and Penstock holds it. Leave it out: "
                "evaluation computes in the precision of training, bf16=True or precision='bf16'."
            )
    differing = [name for name, value in elsewhere.items() if _plain(getattr(args, name, value)) != value]
    if differing:
        said = ", ".join(f"{name}={_plain(getattr(args, name))!r} and {elsewhere[name]!r}" for name in differing)
        raise ConfigError(
            f"TrainingArguments and the configuration file differ: {said}. Say the same in both, or leave it out "
            "of the file ('auto', in one of DeepSpeed)."
        )


def check_optim(args: Any) -> None:
    """Refuse a name of an optimizer that Penstock has no rule for.

    Raises:
        ConfigError: names the nearest that there is.
    """
    name = _plain(args.optim)
    if name in OPTIMIZERS:
        return
    hint = next((hint for part, hint in _HINTS.items() if part in name), f"Use one of {', '.join(OPTIMIZERS)}")
    raise ConfigError(
        f"TrainingArguments(optim={name!r}): Penstock has rules of its own for the optimizers that it moves and "
        f"shards, and none for it. {hint}."
    )


def choose_precision(args: Any, arguments: Mapping[str, Any], model: nn.Module | None) -> ComputePrecision:
    """Choose the precision of a run: what is said, else what the model is in.

    Arguments:
        args: transformers' `TrainingArguments`; `bf16` and `fp16` count, and what `accelerate launch` was told.
        arguments: those of `penstock.prepare`; `precision` counts.
        model: a model whose parameters are bf16 or fp16 was loaded to compute in that. `None` where it is not made yet.

    Raises:
        ConfigError: two that contradict each other; fp8.
    """
    theirs = args.mixed_precision
    names = {name: precision for precision, name in PRECISIONS.items()}
    if theirs not in names:
        raise ConfigError(
            f"TrainingArguments and its launcher say mixed_precision={theirs!r}. Use bf16=True or fp16=True."
        )
    given = None if theirs == "no" else names[theirs]  # "no" also where nobody chose
    source = f"TrainingArguments({theirs}=True)"
    return _common.choose_precision(arguments.get("precision"), given, source=source) or _precision_of(model)


def _plain(value: Any) -> Any:
    """Return what an enumeration's member stands for."""
    return getattr(value, "value", value)


def _precision_of(model: nn.Module | None) -> ComputePrecision:
    """Tell the precision that a model was loaded in."""
    floating = (p.dtype for p in model.parameters() if p.is_floating_point()) if model is not None else ()
    return _OF_DTYPES.get(next(iter(floating), torch.float32), "fp32")
