"""accelerate's block `fsdp_config`, of FSDP's version 1 and 2."""

from collections.abc import Mapping
from typing import Any

from penstock.integrations.convert.rows import Keys, Row, Says, argument, loop, no_counterpart, not_needed

_BLOCK = "fsdp_config"
#: By name and number: the stage, and whether it is of each host alone.
_STRATEGIES: Mapping[str, tuple[int, bool]] = {
    **dict.fromkeys(("1", "full_shard"), (3, False)),
    **dict.fromkeys(("2", "shard_grad_op"), (2, False)),
    **dict.fromkeys(("3", "no_shard"), (0, False)),
    **dict.fromkeys(("4", "hybrid_shard"), (3, True)),
    **dict.fromkeys(("5", "hybrid_shard_zero2"), (2, True)),
}
#: The keys that say what is sharded.
STRATEGIES = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
_WHOLE = "parameters stay whole on every rank between steps as well"
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16"), "fp16"),
}


def _reshard(value: Any, keys: Keys) -> Says:
    if not _is_second(keys):
        if keys.get(f"{_BLOCK}.fsdp_sharding_strategy") is not None:
            return not_needed("fsdp_sharding_strategy counts in version 1")
        return _strategy("fsdp_reshard_after_forward", value, keys)
    if keys.as_flag(f"{_BLOCK}.fsdp_reshard_after_forward", value):
        return argument("stage", 3)
    return argument("stage", 2, _WHOLE)


def _sharding(value: Any, keys: Keys) -> Says:
    if _is_second(keys):
        return not_needed("fsdp_reshard_after_forward counts in version 2")
    return _strategy("fsdp_sharding_strategy", value, keys)


def _is_second(keys: Keys) -> bool:
    return keys.number(f"{_BLOCK}.fsdp_version", 1) >= 2


def _strategy(name: str, value: Any, keys: Keys) -> Says:
    """Read a strategy of version 1, by its name or its number."""
    stage, is_hybrid = keys.one_of(f"{_BLOCK}.{name}", value, _STRATEGIES)
    text = _WHOLE if stage == 2 else ""
    if not is_hybrid:
        return argument("stage", stage, text)
    hosts, ranks = int(keys.number("num_machines", 1)), int(keys.number("num_processes", 0))
    if hosts > 1 and ranks and not ranks % hosts:
        shape = (hosts, ranks // hosts)
        return Says("argument", f"mesh of {shape}: sharded inside each host. {text}", {"stage": stage}, mesh=shape)
    within = "a mesh of (hosts, ranks of a host) shards inside each host alone"
    return argument("stage", stage, f"{within}; with one host it changes nothing. {text}".rstrip())


def _offload(value: Any, keys: Keys) -> Says:
    if not keys.as_flag(f"{_BLOCK}.fsdp_offload_params", value):
        return not_needed("everything stays on the device")
    homes = ("params", "grads", "optimizer")
    return Says("argument", "each could be apart", {f"placement.{home}": "cpu" for home in homes})


def _classes(value: Any, keys: Keys) -> Says:
    names = value if isinstance(value, list) else str(value).split(",")
    return argument("units", [str(name).strip() for name in names if str(name).strip()])


def _wrap_policy(value: Any, keys: Keys) -> Says:
    policy = str(value).upper()
    if policy == "TRANSFORMER_BASED_WRAP":
        if keys.get(f"{_BLOCK}.fsdp_transformer_layer_cls_to_wrap") is not None:
            return not_needed("units= names the classes")
        return not_needed("each repeated block is a unit by default")
    if policy == "SIZE_BASED_WRAP":
        return no_counterpart("units are not chosen by size: each repeated block is one; units= says otherwise")
    return not_needed("each repeated block is a unit by default: less memory, the same result")


def _checkpointing(value: Any, keys: Keys) -> Says:
    if not keys.as_flag(f"{_BLOCK}.fsdp_activation_checkpointing", value):
        return not_needed("the model does as it does")
    return loop("model.gradient_checkpointing_enable(), or torch.utils.checkpoint", gradient_checkpointing=True)


def _offloaded_activations(value: Any, keys: Keys) -> Says:
    if not keys.as_flag(f"{_BLOCK}.fsdp_activation_checkpointing_offload", value):
        return not_needed("activations stay on the device")
    return argument("placement.activations", "cpu")


def _loading(value: Any, keys: Keys) -> Says:
    if not keys.as_flag(f"{_BLOCK}.fsdp_cpu_ram_efficient_loading", value):
        return not_needed("the first rank's parameters are taken over by every rank")
    return loop("make the model on the meta device; prepare(weights=FOLDER) reads it, one unit at a time on every rank")


def _reduce_dtype(path: str) -> Row:
    return lambda value, keys: argument("reduce_dtype", keys.one_of(f"{_BLOCK}.{path}", value, _DTYPES))


_PREFETCH = not_needed("units are gathered ahead of use, as far as Options(prefetch_bytes=) reaches")
_POLICY = "fsdp_mixed_precision_policy"
_ROWS: Mapping[str, Row] = {
    "fsdp_version": not_needed("both versions become the same"),
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _offload,
    "fsdp_auto_wrap_policy": _wrap_policy,
    "fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_transformer_cls_names_to_wrap": _classes,
    "fsdp_min_num_params": no_counterpart("units are not chosen by size; units= says which modules they are"),
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": _PREFETCH,
    "fsdp_limit_all_gathers": not_needed("Options(live_bytes=) bounds what is gathered at once"),
    "fsdp_state_dict_type": loop("optimizer.save() writes shards; penstock export makes whole weights of them"),
    "fsdp_use_orig_params": not_needed("parameters stay the model's own, frozen and trained ones together"),
    "fsdp_cpu_ram_efficient_loading": _loading,
    "fsdp_sync_module_states": not_needed("the first rank's parameters are taken over by every rank"),
    "fsdp_activation_checkpointing": _checkpointing,
    "fsdp_activation_checkpointing_offload": _offloaded_activations,
    "fsdp_ignored_modules": no_counterpart("freeze them, or leave them out of the optimizer: they are kept"),
    "fsdp_param_init_fn": loop("prepare(weights=) takes a folder, tensors by name, a function or 'init'"),
    f"{_POLICY}.param_dtype": not_needed("it is mixed_precision's"),
    f"{_POLICY}.reduce_dtype": _reduce_dtype(f"{_POLICY}.reduce_dtype"),
    f"{_POLICY}.buffer_dtype": no_counterpart("buffers keep their dtype"),
    f"{_POLICY}.output_dtype": no_counterpart("outputs are of the compute dtype; cast them in the loss"),
    f"{_POLICY}.cast_forward_inputs": not_needed("inputs of units are cast: Options(cast_inputs=)"),
    f"{_POLICY}.*": not_needed("it is mixed_precision's"),
}
FSDP_ROWS: Mapping[str, Row] = {f"{_BLOCK}.{name}": row for name, row in _ROWS.items()}
