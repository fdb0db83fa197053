"""DeepSpeed's dtypes and loss scale: in what is computed, summed and kept."""

from collections.abc import Mapping
from typing import Any

from penstock.integrations.convert.rows import Keys, Row, Says, argument, default, loop, no_counterpart, not_needed

_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}


def precision(keys: Keys) -> str | None:
    """Tell in which precision DeepSpeed computes; `None` where Trainer is to say."""
    if keys.flag("fp16.enabled"):
        return "fp16"
    if keys.flag("bf16.enabled") or keys.flag("bfloat16.enabled"):
        return "bf16"
    open_keys = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled")
    return None if any(keys.is_auto(path) for path in open_keys) else "fp32"


def _precision_row(name: str) -> Row:
    def row(value: Any, keys: Keys) -> Says:
        if keys.as_flag(f"{name}.enabled", value):
            return argument("precision", name)
        return not_needed("this precision is off")

    return row


def _loss_scale(value: Any, keys: Keys) -> Says:
    number = keys.as_number("fp16.loss_scale", value)
    if precision(keys) != "fp16":
        return not_needed("fp16 is off")
    if number == 0:
        return argument("options.dynamic_loss_scale", True)
    return Says("argument", "", {"options.initial_loss_scale": number, "options.dynamic_loss_scale": False})


def _scale_power(value: Any, keys: Keys) -> Says:
    power = keys.as_number("fp16.initial_scale_power", value)
    if precision(keys) != "fp16" or keys.number("fp16.loss_scale", 0) != 0:
        return not_needed("it counts for a dynamic loss scale of fp16 alone")
    return argument("options.initial_loss_scale", 2.0**power, "2 to this power")


def _masters_in_16_bits(value: Any, keys: Keys) -> Says:
    if not keys.as_flag("bf16.bf16_master_weights_and_grads", value):
        return not_needed("masters in fp32 are the default")
    return argument("master", "none", "updates are rounded stochastically (Options(rounding=)), not to nearest")


def _states_in_16_bits(value: Any, keys: Keys) -> Says:
    if not keys.as_flag("bf16.bf16_optimizer_states", value):
        return not_needed("states in fp32 are the default")
    return argument("options.state_dtype", "bf16")


def _dtype(path: str) -> Row:
    names = {"data_types.grad_accum_dtype": "grad_accumulation_dtype", "communication_data_type": "reduce_dtype"}

    def row(value: Any, keys: Keys) -> Says:
        return argument(names[path], keys.one_of(path, value, _DTYPES))

    return row


PRECISION_ROWS: Mapping[str, Row] = {
    "bf16.enabled": _precision_row("bf16"),
    "bfloat16.enabled": _precision_row("bf16"),
    "bf16.immediate_grad_update": not_needed("gradients go to their home as soon as they are reduced"),
    "bf16.check_grad_overflow": default(
        "true", "steps that are not finite are skipped", no_counterpart("a step that is not finite is never made")
    ),
    "bf16.bf16_master_weights_and_grads": _masters_in_16_bits,
    "bf16.bf16_optimizer_states": _states_in_16_bits,
    "fp16.enabled": _precision_row("fp16"),
    "fp16.auto_cast": not_needed("floating-point inputs are cast: Options(cast_inputs=)"),
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": _scale_power,
    "fp16.loss_scale_window": default(
        "2000", "as here", no_counterpart("the scale is doubled after 2,000 good steps, as torch's GradScaler does")
    ),
    "fp16.hysteresis": default("1", "as here", no_counterpart("the scale is halved at the first overflow")),
    "fp16.consecutive_hysteresis": not_needed("there is no hysteresis"),
    "fp16.min_loss_scale": default("1", "as here", no_counterpart("the scale does not fall below 1")),
    "fp16.fp16_master_weights_and_grads": default("false", "off", no_counterpart("fp16 always has fp32 masters")),
    "torch_autocast.*": loop("compute under torch.autocast yourself; its parameters stay fp32: precision='fp32'"),
    "amp.*": no_counterpart("removed from DeepSpeed; precision= is in its place"),
    "communication_data_type": _dtype("communication_data_type"),
    "seq_parallel_communication_data_type": no_counterpart("there is no sequence parallelism here"),
    "data_types.grad_accum_dtype": _dtype("data_types.grad_accum_dtype"),
    "data_types.param_dtype": no_counterpart("precision= is the dtype of all parameters, but those beside statistics"),
    "data_types.buffer_dtype": no_counterpart("buffers keep their dtype"),
    "data_types.keep_in_fp32_modules": not_needed("buffers keep their dtype, and batch norms are fp32"),
}
