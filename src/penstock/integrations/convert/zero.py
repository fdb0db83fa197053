"""DeepSpeed's block `zero_optimization`: the stage, where state rests, and sizes."""

from collections.abc import Mapping
from typing import Any

from penstock.integrations.convert.precision import precision
from penstock.integrations.convert.rows import Keys, Row, Says, argument, default, loop, no_counterpart, not_needed

ZERO = "zero_optimization"
_TIERS = {"none": "device", "cpu": "cpu", "nvme": "nvme"}


def stage_of(keys: Keys) -> int:
    """Tell the ZeRO stage."""
    block = keys.config.get(ZERO)
    if isinstance(block, bool):  # an old form
        return int(block)
    path = f"{ZERO}.stage"
    return int(keys.one_of(path, keys.get(path, 0), {"0": 0, "1": 1, "2": 2, "3": 3}))


_AT_STAGE_3 = not_needed("DeepSpeed reads it at stage 3 alone")


def _size(name: str, option: str, least: int = 0) -> Row:
    """Make the row of a size in elements that is one of `Options` in bytes."""

    def row(value: Any, keys: Keys) -> Says:
        numel = int(keys.as_number(f"{ZERO}.{name}", value))
        if stage_of(keys) != 3:
            return _AT_STAGE_3
        size = 4 if precision(keys) == "fp32" else 2
        return argument(f"options.{option}", max(least, numel * size), f"{numel:,} elements of {size} bytes")

    return row


def _folders(keys: Keys) -> list[str]:
    """List the folders of what is on nvme, each once."""
    paths = [
        keys.get(f"{ZERO}.{block}.nvme_path")
        for block in ("offload_optimizer", "offload_param")
        if keys.get(f"{ZERO}.{block}.device") == "nvme"
    ]
    return list(dict.fromkeys(str(path) for path in paths if path))


def _nvme_path(block: str) -> Row:
    def row(value: Any, keys: Keys) -> Says:
        if keys.get(f"{ZERO}.{block}.device") != "nvme" or (block == "offload_param" and stage_of(keys) != 3):
            return not_needed("nothing of it is on nvme")
        found = _folders(keys)
        if not found:
            raise keys.fail(f"{ZERO}.{block}.nvme_path", value, "a folder")
        text = "state is striped over both folders" if len(found) > 1 else ""
        return argument("placement.nvme_path", found if len(found) > 1 else found[0], text)

    return row


def _param_device(value: Any, keys: Keys) -> Says:
    tier = keys.one_of(f"{ZERO}.offload_param.device", value, _TIERS)
    if tier == "device":
        return not_needed("parameters stay on the device")
    if stage_of(keys) != 3:
        return _AT_STAGE_3
    return argument("placement.params", tier)


def _optimizer_device(value: Any, keys: Keys) -> Says:
    tier = keys.one_of(f"{ZERO}.offload_optimizer.device", value, _TIERS)
    if tier == "device":
        return not_needed("the optimizer's state stays on the device")
    ratio = keys.number(f"{ZERO}.offload_optimizer.ratio", 1.0) if stage_of(keys) == 3 else 1.0
    return Says("argument", "gradients as in DeepSpeed", _offloaded(tier, ratio))


def _offloaded(tier: str, ratio: float) -> dict[str, Any]:
    """Place an optimizer's state of which a share is offloaded, and gradients beside it; never these in files."""

    def home(name: str) -> Any:
        return name if ratio == 1 else {name: ratio, "device": 1 - ratio}

    return {"placement.optimizer": home(tier), "placement.grads": home("cpu")}


def _ratio(value: Any, keys: Keys) -> Says:
    ratio = keys.as_number(f"{ZERO}.offload_optimizer.ratio", value)
    if not 0 <= ratio <= 1:
        raise keys.fail(f"{ZERO}.offload_optimizer.ratio", value, "a number from 0 to 1")
    tier = keys.one_of("device", keys.get(f"{ZERO}.offload_optimizer.device", "none"), _TIERS)
    if tier == "device" or stage_of(keys) != 3:
        return not_needed("it counts at stage 3 for an optimizer that is offloaded")
    return Says("argument", "Twin-Flow: the share that is offloaded", _offloaded(tier, ratio))


def _old_offload(argument_of: str) -> Row:
    def row(value: Any, keys: Keys) -> Says:
        if not keys.as_flag(argument_of, value):
            return not_needed("nothing is offloaded")
        if argument_of == "cpu_offload":
            return Says("argument", "", _offloaded("cpu", 1.0))
        return argument("placement.params", "cpu") if stage_of(keys) == 3 else _AT_STAGE_3

    return row


def _carried(name: str, says: Says) -> Row:
    """Make the row of a switch of ZeRO++, which is nothing but in stage 3."""

    def row(value: Any, keys: Keys) -> Says:
        if not keys.as_flag(f"{ZERO}.{name}", value):
            return not_needed("off")
        return says if stage_of(keys) == 3 else _AT_STAGE_3

    return row


def _frozen(value: Any, keys: Keys) -> Says:
    if not keys.as_flag(f"{ZERO}.zero_quantized_nontrainable_weights", value):
        return not_needed("off")
    if stage_of(keys) != 3:
        return _AT_STAGE_3
    if keys.flag(f"{ZERO}.zero_quantized_weights"):
        return not_needed("gather_format='int8' carries frozen weights as the others; their homes stay exact")
    return no_counterpart("Options(gather_format='int8') rounds the gathers of all weights, not of frozen ones alone")


def _secondary(value: Any, keys: Keys) -> Says:
    path = f"{ZERO}.zero_hpz_partition_size"
    size = keys.as_number(path, value)
    if size != int(size) or size < 1:
        raise keys.fail(path, value, "a whole number of ranks, 1 or more (1: no second shard)")
    if size == 1:
        return not_needed("off")
    if stage_of(keys) != 3:
        return _AT_STAGE_3
    return argument("options.secondary_shard", int(size), _SECONDARY)


_WEIGHTS = argument(
    "options.gather_format",
    "int8",
    "blocks of 256 where DeepSpeed has larger groups; what is kept inside a node is not rounded again",
)
_GRADIENTS = argument(
    "options.reduce_format",
    "int4",
    "on both hops, in blocks of 256, summed in fp32; those of one dimension too, which DeepSpeed sends exactly; one "
    "node is one hop, rounded once",
)
_SECONDARY = (
    "the part is on the device where parameters are at home there, else on the cpu tier; nodes of a reduce_format are "
    "of as many ranks, where DeepSpeed takes a host's devices"
)
_SAVE = loop("optimizer.save() writes shards; penstock export makes whole weights of them")
_NEW = {
    "mics": no_counterpart("removed from DeepSpeed; a mesh of two dimensions shards within groups"),
    "buffers": not_needed("buffers on the way to files are of tiles, as many as there are requests"),
    "pinned": not_needed("what the device copies is pinned, in exact size; Options(pinned_bytes=) bounds it"),
    "overlap": not_needed("always done, without a host that waits"),
    "buckets": not_needed("one collective for each unit; no bucket has a size"),
}

_BLOCK: Mapping[str, Row] = {
    "stage": lambda value, keys: argument("stage", stage_of(keys)),
    "contiguous_gradients": not_needed("a unit's gradients lie in one buffer"),
    "reduce_scatter": not_needed("always a reduce-scatter of each unit"),
    "reduce_bucket_size": _NEW["buckets"],
    "use_multi_rank_bucket_allreduce": _NEW["buckets"],
    "allgather_partitions": not_needed("always an all-gather of each unit"),
    "allgather_bucket_size": _NEW["buckets"],
    "overlap_comm": _NEW["overlap"],
    "compute_grad_norm": not_needed("the norm is measured on the gradient's way, in no pass of its own"),
    "load_from_fp32_weights": not_needed("checkpoints hold the master weights"),
    "elastic_checkpoint": not_needed("every checkpoint loads at any world size, stage and placement"),
    "offload_param.device": _param_device,
    "offload_param.nvme_path": _nvme_path("offload_param"),
    "offload_param.buffer_count": _NEW["buffers"],
    "offload_param.buffer_size": _NEW["buffers"],
    "offload_param.max_in_cpu": no_counterpart(
        "a count of elements; say a share instead: Placement(params={'cpu': 0.3, 'nvme': 0.7})"
    ),
    "offload_param.pin_memory": _NEW["pinned"],
    "offload_optimizer.device": _optimizer_device,
    "offload_optimizer.nvme_path": _nvme_path("offload_optimizer"),
    "offload_optimizer.buffer_count": _NEW["buffers"],
    "offload_optimizer.pin_memory": _NEW["pinned"],
    "offload_optimizer.pipeline_read": _NEW["overlap"],
    "offload_optimizer.pipeline_write": _NEW["overlap"],
    "offload_optimizer.fast_init": not_needed("state is written to its home once, as it is made"),
    "offload_optimizer.ratio": _ratio,
    "offload_optimizer.super_offload": default(
        "false", "off", no_counterpart("updates of the last step overlap with the next forward: overlap='auto'")
    ),
    "offload_optimizer.cpuadam_cores_perc": no_counterpart("say a number of threads: Options(update_threads=)"),
    "zenflow.*": no_counterpart("updates that are put off change the result; overlap='auto' hides them exactly"),
    "sub_group_size": not_needed("updates go tile by tile (Options(tile_bytes=)), whatever a parameter's size is"),
    "cpu_offload": _old_offload("cpu_offload"),
    "cpu_offload_param": _old_offload("cpu_offload_param"),
    "cpu_offload_use_pin_memory": _NEW["pinned"],
    "stage3_prefetch_bucket_size": _size("stage3_prefetch_bucket_size", "prefetch_bytes"),
    "stage3_param_persistence_threshold": _size("stage3_param_persistence_threshold", "persistent_bytes"),
    "stage3_model_persistence_threshold": no_counterpart(
        "what stays gathered is bounded by the size of a parameter alone: Options(persistent_bytes=)"
    ),
    "stage3_max_live_parameters": _size("stage3_max_live_parameters", "live_bytes", least=1),
    "stage3_max_reuse_distance": not_needed("what is used next is known, and kept as far as Options(live_bytes=) goes"),
    "stage3_gather_16bit_weights_on_model_save": _SAVE,
    "stage3_gather_fp16_weights_on_model_save": _SAVE,
    "stage3_module_granularity_threshold": not_needed("units are whole blocks; prepare(units=) says which"),
    "stage3_use_all_reduce_for_fetch_params": not_needed("one all-gather for each unit, into its buffer"),
    "stage3_allgather_sequential": not_needed("a unit is gathered into its buffer, without a copy"),
    "ignore_unused_parameters": not_needed("parameters without a gradient are let be, as in torch"),
    "legacy_stage1": not_needed("stage 1 has one form"),
    "round_robin_gradients": not_needed("every rank copies the same share of every unit's gradient"),
    "parameter_alignment": not_needed("parameters begin at aligned places"),
    "zero_hpz_partition_size": _secondary,
    "zero_quantized_weights": _carried("zero_quantized_weights", _WEIGHTS),
    "zero_quantized_nontrainable_weights": _frozen,
    "zero_quantized_gradients": _carried("zero_quantized_gradients", _GRADIENTS),
    "mics_shard_size": _NEW["mics"],
    "mics_hierarchical_params_gather": _NEW["mics"],
    "zeropp_loco_param": no_counterpart("removed from DeepSpeed; no rounding error is added to the next gradient"),
    "memory_efficient_linear": not_needed("autograd keeps a place of a released weight, of any layer"),
    "pipeline_loading_checkpoint": not_needed("weights are read unit by unit: prepare(weights=)"),
    "override_module_apply": not_needed("models are made on the meta device, and filled by prepare(weights=)"),
    "log_trace_cache_warnings": not_needed("another order of modules costs time at most"),
    "enable_sanity_checks": not_needed("ranks always compare what they issue; Options(debug_release=) finds misuse"),
    "save_muon_momentum_buffer_in_memory": no_counterpart(
        "momentum rests where Placement(optimizer=...) says; the optimizer is penstock.optim.MuonAdamW"
    ),
    "leaf_module.*": loop("say which modules are gathered as one: prepare(units=[TheExpertBlock])"),
}

ZERO_ROWS: Mapping[str, Row] = {
    **{f"{ZERO}.{name}": row for name, row in _BLOCK.items()},
    ZERO: lambda value, keys: argument("stage", stage_of(keys), "a form of old"),
    "allgather_size": _NEW["buckets"],
}
