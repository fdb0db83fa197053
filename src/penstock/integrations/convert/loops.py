"""What DeepSpeed's configuration says of the training loop: batches, the optimizer, the schedule."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.integrations.convert.rows import Keys, Row, Says, default, loop, no_counterpart, not_needed

_OPTIMIZER = "optimizer.params"
_SCHEDULE = "scheduler.params"
#: By the name in DeepSpeed: the class, and its options whose default is another there.
_CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adam": ("torch.optim.AdamW", {"weight_decay": 0.0}),  # DeepSpeed's Adam decays like AdamW unless it is told not to
    "adamw": ("torch.optim.AdamW", {"weight_decay": 0.0}),
    "adagrad": ("torch.optim.Adagrad", {}),
    "lion": ("penstock.optim.Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
}
_REFUSED = ("lamb", "muadam", "muadamw", "musgd", "onebitadam", "zerooneadam", "onebitlamb")
_WARM = "lr_scheduler_type"


def optimizer_line(keys: Keys) -> str | None:
    """Write the optimizer of a configuration as a line of Python; `None` where there is none, or none for us.

    Options that are `"auto"` are left out.
    """
    name = str(keys.get("optimizer.type", ""))
    if not name or name.lower() in _REFUSED:
        return None
    if name.lower() == "muon":
        return _muon_line(keys)
    params = keys.get(_OPTIMIZER, {})
    if not isinstance(params, Mapping):
        raise keys.fail(_OPTIMIZER, params, "a mapping")
    kind, defaults = _CLASSES.get(name.lower(), (f"torch.optim.{name}", {}))
    if name.lower() == "adam" and not keys.flag(f"{_OPTIMIZER}.adam_w_mode", True):
        kind = "torch.optim.Adam"
    if keys.flag(f"{_OPTIMIZER}.torch_adam"):
        defaults = {}
    given = {key: value for key, value in params.items() if value != "auto" and key not in _OF_DEEPSPEED}
    options = {**defaults, **{key: _option(keys, key, value) for key, value in given.items()}}
    highest = keys.get(f"{_SCHEDULE}.warmup_max_lr")
    if highest is not None:  # it takes the place of the optimizer's
        options["lr"] = _option(keys, "lr", highest)
    written = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"{kind}(model.parameters(){written})"


def _muon_line(keys: Keys) -> str:
    """Write DeepSpeed's Muon, which has AdamW in it for what is no hidden matrix, with the defaults of both there."""
    options: dict[str, Any] = {}
    for key, name, default_rate in (("lr", "muon_lr", 0.02), ("adamw_lr", "adam_lr", 3e-4)):
        own = keys.number(f"{_OPTIMIZER}.{name}", keys.number(f"{_OPTIMIZER}.lr", default_rate))
        options[key] = keys.number(f"{_SCHEDULE}.warmup_max_lr", own)
    of_both = {"weight_decay": 0.0, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10}
    for key, value in of_both.items():
        ours = f"adamw_{key}" if key in ("betas", "eps") else key
        options[ours] = _option(keys, key, keys.get(f"{_OPTIMIZER}.{key}", value))
    options["adjust_lr_fn"] = "original"
    return f"penstock.optim.MuonAdamW(model, {', '.join(f'{key}={value!r}' for key, value in options.items())})"


#: Options of an optimizer that choose among DeepSpeed's implementations.
_OF_DEEPSPEED = ("adam_w_mode", "torch_adam", "fp32_optimizer_states", "bias_correction", "set_grad_none", "foreach")


def _option(keys: Keys, key: str, value: Any) -> Any:
    """Read an option: pairs as tuples, and numbers that are written as text."""
    path = f"{_OPTIMIZER}.{key}"
    if isinstance(value, list | tuple):
        return tuple(keys.as_number(path, item) for item in value)
    return keys.as_number(path, value) if isinstance(value, str) else value


def schedule_line(keys: Keys) -> str | None:
    """Write a warm-up, with or without a linear decay, as a line of Python; `None` for other schedules.

    DeepSpeed makes the first two steps with the least rate, and so does the line.
    """
    name, warmup, total = (
        keys.get("scheduler.type"),
        keys.get(f"{_SCHEDULE}.warmup_num_steps", 1000),
        keys.get(f"{_SCHEDULE}.total_num_steps"),
    )
    if name not in ("WarmupLR", "WarmupDecayLR") or (name == "WarmupDecayLR" and total is None):
        return None
    if any(keys.is_auto(f"{_SCHEDULE}.{key}") for key in ("warmup_num_steps", "total_num_steps", "warmup_min_lr")):
        return None
    steps = max(2, int(keys.as_number(f"{_SCHEDULE}.warmup_num_steps", warmup)))
    factor = f"max(step - 1, 0) / {steps}"
    if keys.get(f"{_SCHEDULE}.warmup_type", "log") != "linear":
        factor = f"math.log(max(step, 1)) / {math.log(steps)!r}"
    terms = ["1.0", factor]
    if name == "WarmupDecayLR":
        last = int(keys.as_number(f"{_SCHEDULE}.total_num_steps", total))
        terms[0] = f"max(0.0, ({last + 1} - step) / {max(1, last - steps)})"
    least = keys.number(f"{_SCHEDULE}.warmup_min_lr", 0.0)
    highest = keys.number(f"{_SCHEDULE}.warmup_max_lr", keys.number(f"{_OPTIMIZER}.lr", 1e-3))
    scaled = f"min({', '.join(terms)})"
    if least:
        share = least / highest
        scaled = f"{share!r} + {1 - share!r} * {scaled}"
    return f"torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {scaled})"


def _type_of_optimizer(value: Any, keys: Keys) -> Says:
    line = optimizer_line(keys)
    if line is None:
        return no_counterpart("it computes across elements, or is not there; prepare() says which optimizers it takes")
    return loop(f"optimizer = {line}", optimizer=line)


def _type_of_schedule(value: Any, keys: Keys) -> Says:
    kind = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(str(value))
    line = schedule_line(keys)
    if line is not None:
        return loop(f"scheduler = {line}, after prepare()", scheduler=line, **{_WARM: kind})
    if kind is not None:
        return loop(f"Trainer's lr_scheduler_type='{kind}' is near; in a loop of your own, a LambdaLR", **{_WARM: kind})
    return loop("any scheduler of torch works, after prepare(); this one has no line here")


def _count(path: str, name: str, text: str) -> Row:
    def row(value: Any, keys: Keys) -> Says:
        return loop(text, **{name: int(keys.as_number(path, value))})

    return row


LOOP_ROWS: Mapping[str, Row] = {
    "train_batch_size": _count(
        "train_batch_size", "train_batch_size", "samples of a step over all ranks: the data loader's"
    ),
    "train_micro_batch_size_per_gpu": _count(
        "train_micro_batch_size_per_gpu", "per_device_train_batch_size", "the data loader's batch_size"
    ),
    "gradient_accumulation_steps": _count(
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        "backward(loss / n) n times, then step() and zero_grad(); DeepSpeed divides the loss itself",
    ),
    "managed_gradient_accumulation": loop("the loop says when a step is made: it calls step()"),
    "optimizer.type": _type_of_optimizer,
    "optimizer.params.*": loop("in the line of optimizer.type"),
    "optimizer.params.bias_correction": default("true", "as in torch", no_counterpart("bias is always corrected")),
    "optimizer.params.ns_method": not_needed("Newton-Schulz iterations as torch.optim.Muon has them"),
    "optimizer.params.max_grad_norm": no_counterpart("DeepSpeed refuses it; say gradient_clipping"),
    **{
        f"optimizer.params.{key}": not_needed("it chooses among DeepSpeed's implementations")
        for key in ("torch_adam", "fp32_optimizer_states", "set_grad_none", "foreach")
    },
    "optimizer.params.adam_w_mode": loop("AdamW where it is true, Adam where it is not: in the line of optimizer.type"),
    "optimizer.legacy_fusion": not_needed("one native update"),
    "scheduler.type": _type_of_schedule,
    "scheduler.params.*": loop("in the line of scheduler.type"),
    "dataloader_drop_last": loop("DataLoader(drop_last=)"),
    "data_efficiency.*": no_counterpart("data is the loop's"),
    "curriculum_learning.*": no_counterpart("data is the loop's"),
    "progressive_layer_drop.*": no_counterpart("removed from DeepSpeed; layers are the model's"),
    "eigenvalue.*": no_counterpart("removed from DeepSpeed"),
    "vocabulary_size": not_needed("it is for a hint of DeepSpeed's"),
    "steps_per_print": loop("the loop prints what it likes"),
}
