"""DeepSpeed's configuration: every key of 0.19, and what it becomes."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.convert.converted import Converted, Note
from penstock.integrations.convert.loops import LOOP_ROWS
from penstock.integrations.convert.precision import PRECISION_ROWS, precision
from penstock.integrations.convert.rows import (
    Keys,
    Row,
    Says,
    argument,
    convert,
    filled_in,
    in_order,
    loop,
    no_counterpart,
    not_needed,
)
from penstock.integrations.convert.zero import ZERO, ZERO_ROWS, stage_of

#: What Trainer fills in where a configuration says "auto": the field of its `TrainingArguments`.
AUTOS: Mapping[str, Says] = {
    "train_micro_batch_size_per_gpu": filled_in("per_device_train_batch_size"),
    "gradient_accumulation_steps": filled_in("gradient_accumulation_steps"),
    "train_batch_size": filled_in("per_device_train_batch_size"),
    "gradient_clipping": filled_in("max_grad_norm"),
    "bf16.enabled": filled_in("bf16"),
    "bfloat16.enabled": filled_in("bf16"),
    "fp16.enabled": filled_in("fp16"),
    "optimizer.params.lr": filled_in("learning_rate"),
    "optimizer.params.betas": filled_in("adam_beta1"),
    "optimizer.params.eps": filled_in("adam_epsilon"),
    "optimizer.params.weight_decay": filled_in("weight_decay"),
    "scheduler.params.warmup_max_lr": filled_in("learning_rate"),
    "scheduler.params.warmup_num_steps": filled_in("warmup_steps"),
    "scheduler.params.total_num_steps": filled_in("max_steps"),
    **dict.fromkeys(
        [f"{ZERO}.{name}" for name in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")],
        not_needed("Trainer makes a size of the model's hidden size; the default here needs none"),
    ),
}


def convert_deepspeed(config: Mapping[str, Any], *, source: str = "The configuration of DeepSpeed") -> Converted:
    """Convert a configuration of DeepSpeed.

    Arguments:
        config: what its file holds.
        source: what to call it in messages.

    Raises:
        ConfigError: it is no mapping, or a value is not what its key takes. The message names the key.

    Example:
        >>> converted = convert_deepspeed({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
        >>> converted.arguments
        {'precision': 'bf16', 'stage': 2}
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} is a {type(config).__name__}. Give the mapping that its file holds.")
    keys = Keys(source, config)
    converted = convert(keys, ROWS, AUTOS, _unsaid(keys))
    unsaid: dict[str, Any] = {}
    if precision(keys) == "fp32":
        unsaid["precision"] = "fp32"
    if keys.get(f"{ZERO}.stage") is None and not keys.is_auto(f"{ZERO}.stage"):
        unsaid["stage"] = stage_of(keys)
    return Converted(in_order({**unsaid, **converted.arguments}), converted.notes, converted.training)


def _unsaid(keys: Keys) -> list[Note]:
    """Name what the file leaves to DeepSpeed's defaults where those of `prepare` are others."""
    notes = []
    if precision(keys) == "fp32" and not {"bf16", "bfloat16", "fp16"} & keys.config.keys():
        notes.append(Note("bf16, fp16", None, "argument", "precision='fp32'; neither is there, so DeepSpeed uses fp32"))
    if keys.get(f"{ZERO}.stage") is None:
        stage = stage_of(keys)
        notes.append(Note(f"{ZERO}.stage", None, "argument", f"stage={stage}; DeepSpeed's default"))
    return notes


def _cpu_checkpointing(value: Any, keys: Keys) -> Says:
    if not keys.as_flag("activation_checkpointing.cpu_checkpointing", value):
        return not_needed("activations stay on the device")
    return argument("placement.activations", "cpu", "of all that forward saves; the model still checkpoints itself")


def _reduce_op(value: Any, keys: Keys) -> Says:
    operation = keys.one_of("gradient_allreduce_op", value, {"mean": "mean", "sum": "sum"})
    return argument("options.reduce_op", operation)


def _clipping(value: Any, keys: Keys) -> Says:
    norm = keys.as_number("gradient_clipping", value)
    if norm <= 0:
        return not_needed("0 does not clip: max_grad_norm=None, the default")
    return argument("max_grad_norm", norm)


_OWN_TOOL = "belongs to DeepSpeed's own tools; "

ROWS: Mapping[str, Row] = {
    **ZERO_ROWS,
    **PRECISION_ROWS,
    **LOOP_ROWS,
    "gradient_clipping": _clipping,
    "prescale_gradients": not_needed("the mean is taken without a scale of its own"),
    "gradient_predivide_factor": not_needed("the mean is taken without a scale of its own"),
    "gradient_allreduce_op": _reduce_op,
    "disable_allgather": not_needed("always an all-gather"),
    "sparse_gradients": no_counterpart("gradients of embeddings travel dense"),
    "zero_allow_untested_optimizer": not_needed("every optimizer that prepare() takes is tested; others it refuses"),
    "zero_force_ds_cpu_optimizer": not_needed("torch's own optimizers have a native update on the host"),
    "aio.*": not_needed(
        "files are read and written past the page cache, tile by tile; Options(io_queue_depth=) is left"
    ),
    "activation_checkpointing.cpu_checkpointing": _cpu_checkpointing,
    "activation_checkpointing.*": not_needed("torch.utils.checkpoint, or the model's gradient_checkpointing_enable()"),
    "checkpoint.use_node_local_storage": no_counterpart("checkpoints are saved into a folder that all ranks share"),
    "checkpoint.*": not_needed("checkpoints are written in parallel, and loaded at any world size"),
    "datastates_ckpt.*": not_needed("optimizer.save(blocking=False) saves beside training"),
    "disable_python_gc": not_needed("there are no cycles that collection would have to find"),
    "tensor_parallel.*": no_counterpart("there is no tensor parallelism here"),
    "expert_parallel.*": no_counterpart("experts are sharded like all parameters"),
    "use_data_before_expert_parallelism": no_counterpart("experts are sharded like all parameters"),
    "pipeline.*": no_counterpart("there is no pipeline parallelism here"),
    "hybrid_engine.*": no_counterpart("generate under optimizer.gathered()"),
    "weight_quantization.*": no_counterpart("there is no quantised training here"),
    "quantize_training.*": no_counterpart("there is no quantised training here"),
    "compression_training.*": no_counterpart("there is no compression here"),
    "sparse_attention.*": no_counterpart("attention is the model's"),
    "elasticity.*": not_needed("a checkpoint goes on at any world size"),
    "nebula.*": no_counterpart("removed from DeepSpeed"),
    "compile.*": loop("compile the model with torch.compile after prepare()"),
    "graph_harvesting": no_counterpart("compile the model with torch.compile after prepare()"),
    "autotuning.*": no_counterpart(_OWN_TOOL + "sizes are in bytes, and fit as they are"),
    "flops_profiler.*": no_counterpart(_OWN_TOOL + "optimizer.trace() shows what a step waits for"),
    "comms_logger.*": no_counterpart(_OWN_TOOL + "optimizer.trace() shows every collective"),
    "timers.*": no_counterpart(_OWN_TOOL + "optimizer.trace() shows what a step waits for"),
    "wall_clock_breakdown": no_counterpart(_OWN_TOOL + "optimizer.trace() shows what a step waits for"),
    "memory_breakdown": no_counterpart(_OWN_TOOL + "print(optimizer.locations())"),
    "dump_state": no_counterpart(_OWN_TOOL + "print(optimizer.locations())"),
    "log_level": no_counterpart(_OWN_TOOL + "Python's logging has the logger 'penstock'"),
    **dict.fromkeys(
        ("tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*"), loop("the loop logs what step() returns")
    ),
}
