"""Configurations of DeepSpeed and of accelerate (FSDP or DeepSpeed), converted to arguments of `prepare`.

`RULES` has the keys that matter. Keys of `NOT_NEEDED` ask for what happens anyway. Every other key is reported as
unknown: docs/from-deepspeed.md and docs/from-fsdp.md list what stands for it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError, one_line, shown
from penstock.files import read_mapping, yaml_of

Verdict = Literal["auto", "no counterpart", "unknown"]

_AUTO = "auto"
_MOST_POWER = 126  # of a loss scale in fp32
_MOST_CHARS = 120
_MOST_LINE_CHARS = 1000
_NOTHING = "nothing was made of it: see docs/from-deepspeed.md, docs/from-fsdp.md"
_ZERO, _FSDP, _BLOCK = "zero_optimization", "fsdp_config", "deepspeed_config"
_FILE = f"{_BLOCK}.deepspeed_config_file"
_ADAM, _SCHEDULE = "optimizer.params", "scheduler.params"
#: Keys that only a configuration of accelerate has.
_OF_ACCELERATE = frozenset(("compute_environment", "distributed_type", _FSDP, _BLOCK))

_STAGES = {"0": 0, "1": 1, "2": 2, "3": 3}
_TIERS = {"none": "device", "cpu": "cpu", "nvme": "nvme"}
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}
_PRECISIONS = {"no": "fp32", "false": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
#: FSDP 1 by name and number: the stage, and True if state is sharded inside each host alone.
_STRATEGIES = {
    **dict.fromkeys(("1", "full_shard"), (3, False)),
    **dict.fromkeys(("2", "shard_grad_op"), (2, False)),
    **dict.fromkeys(("3", "no_shard"), (0, False)),
    **dict.fromkeys(("4", "hybrid_shard"), (3, True)),
    **dict.fromkeys(("5", "hybrid_shard_zero2"), (2, True)),
}
#: Arguments of `prepare` that `penstock train` does not take.
_OF_PREPARE = ("units", "master", "reduce_dtype", "grad_accumulation_dtype")
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = {
    "adagrad": "torch.optim.Adagrad, or TrainingArguments(optim='adagrad')",
    "lion": "penstock.optim.Lion, or rule: lion of penstock train",
    "muon": "penstock.optim.MuonAdamW, or rule: muon of penstock train",
}


@dataclass(frozen=True)
class Note:
    """A key of which no argument was made, or not all of it.

    Attributes:
        key: its path in the file, such as `zero_optimization.stage`.
        value: its value there.
        verdict: `"auto"` if transformers' Trainer fills it in.
        text: the reason, and what to do.

    Example:
        >>> print(Note("fp16.hysteresis", 2, "no counterpart", "it is 1 here"))
        fp16.hysteresis = 2: it is 1 here
    """

    key: str
    value: Any
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        value = json.dumps(self.value, default=str)
        if len(value) > _MOST_CHARS:
            value = f"{value[:_MOST_CHARS]}..."
        return one_line(f"{self.key} = {value}: {self.text}", _MOST_LINE_CHARS)


@dataclass(frozen=True)
class Converted:
    """A configuration, converted.

    Attributes:
        arguments: those of `prepare`, as JSON has them: dtypes by name ("fp32"), `placement` and `options` as mappings,
            `units` as names of classes. `integrations.arguments.prepare_arguments` reads them.
        notes: keys of which no argument was made, in the order of the file.
        training: fields of transformers' `TrainingArguments`, by name.
        launch: options of `torchrun` by name, as far as the file has them.
        mesh: the shape of the mesh, (hosts, ranks of a host), where state is sharded inside hosts alone.
    """

    arguments: Mapping[str, Any]
    notes: tuple[Note, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None

    def of(self, verdict: Verdict) -> list[Note]:
        """List the notes of one verdict."""
        return [note for note in self.notes if note.verdict == verdict]


class _Keys:
    """Values of a configuration by path, such as `zero_optimization.stage`. `"auto"` and null count as missing.

    Arguments:
        source: the name of the configuration in messages.
        leaves: the value of each key that holds no further keys.
    """

    def __init__(self, source: str, leaves: Mapping[str, Any]) -> None:
        self.source = source
        self.leaves = leaves

    def get(self, path: str, default: Any = None) -> Any:
        value = self.leaves.get(path)
        return default if value is None or value == _AUTO else value

    def number(self, path: str, default: float = 0.0) -> float:
        """Read a finite number, which may be text: YAML reads `5e8` as such."""
        value = self.get(path, default)
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not abs(number) < float("inf"):
            raise self.fail(path, "a number")
        return number

    def flag(self, path: str, default: bool = False) -> bool:
        """Read true or false, which may be text."""
        return bool(self.choice(path, {"true": True, "false": False}, default))

    def choice(self, path: str, choices: Mapping[str, Any], default: Any = None) -> Any:
        """Look a value up by its text in lower case."""
        value = self.get(path)
        if value is None:
            return default
        if str(value).lower() not in choices:
            raise self.fail(path, f"one of {', '.join(choices)}")
        return choices[str(value).lower()]

    def fail(self, path: str, wanted: str) -> ConfigError:
        """Make the error of a value that is not valid; the caller raises it."""
        return ConfigError(f"{self.source}: '{path}' is {shown(self.leaves.get(path))}. Write {wanted}.")

    def stage(self) -> int:
        """Return the stage of a configuration of DeepSpeed."""
        return int(self.choice(f"{_ZERO}.stage", _STAGES, 0))

    def precision(self) -> str | None:
        """Return the precision of a configuration of DeepSpeed; `None` if Trainer fills it in."""
        on = [name for name in ("fp16", "bf16") if self.flag(f"{name}.enabled")]
        is_open = _AUTO in (self.leaves.get("fp16.enabled"), self.leaves.get("bf16.enabled"))
        return on[0] if on else None if is_open else "fp32"

    def tier(self, block: str) -> str:
        """Return the tier of `param`, which DeepSpeed offloads at stage 3 alone, or of `optimizer`."""
        if block == "param" and self.stage() != 3:
            return "device"
        old = {"param": "cpu_offload_param", "optimizer": "cpu_offload"}[block]
        default = "cpu" if self.flag(f"{_ZERO}.{old}") else "device"
        return str(self.choice(f"{_ZERO}.offload_{block}.device", _TIERS, default))


#: Returns what a key is: arguments of `prepare` by path (`placement.params`), `training.NAME`, `launch.NAME`, `mesh`;
#: and as `note` the reason why it, or a part of it, is nothing.
Rule = Callable[[_Keys, str], Mapping[str, Any]]


def _params(keys: _Keys, path: str) -> Mapping[str, Any]:
    del path
    return {"placement.params": keys.tier("param")} if keys.tier("param") != "device" else {}


def _optimizer(keys: _Keys, path: str) -> Mapping[str, Any]:
    """Return the placement of the optimizer's state, of which Twin-Flow offloads a share, and of its gradients."""
    del path
    name, tier = f"{_ZERO}.offload_optimizer.ratio", keys.tier("optimizer")
    share = keys.number(name, 1.0)
    if not 0 <= share <= 1:
        raise keys.fail(name, "a number from 0 to 1")
    if tier == "device":
        return {}
    is_whole = share == 1 or keys.stage() != 3
    places = {"placement.optimizer": tier, "placement.grads": "cpu"}  # DeepSpeed has no gradients in files
    return {name: place if is_whole else {place: share, "device": 1 - share} for name, place in places.items()}


def _folders(keys: _Keys, path: str) -> Mapping[str, Any]:
    blocks = [block for block in ("optimizer", "param") if keys.tier(block) == "nvme"]
    folders = [keys.get(f"{_ZERO}.offload_{block}.nvme_path") for block in blocks]
    folders = [folder for folder in folders if folder is not None]
    if not all(isinstance(folder, str) for folder in folders):
        raise keys.fail(path, "a folder")
    folders = list(dict.fromkeys(folders))
    return {"placement.nvme_path": folders if len(folders) > 1 else folders[0]} if folders else {}


def _bytes(option: str, least: int = 0) -> Rule:
    """Make the rule of a number of elements that is one of bytes here."""

    def rule(keys: _Keys, path: str) -> Mapping[str, Any]:
        return {f"options.{option}": max(least, int(keys.number(path)) * (4 if keys.precision() == "fp32" else 2))}

    return rule


def _secondary(keys: _Keys, path: str) -> Mapping[str, Any]:
    size = keys.number(path, 1)
    if size != int(size) or size < 1:
        raise keys.fail(path, "a whole number of ranks, 1 or more (1: no second shard)")
    return {"options.secondary_shard": int(size)} if size > 1 else {}


def _loss_scale(keys: _Keys, path: str) -> Mapping[str, Any]:
    """Return the loss scale: a fixed one, or a power of 2 that a dynamic one begins with."""
    del path
    fixed, power = keys.number("fp16.loss_scale"), keys.number("fp16.initial_scale_power", 16)
    if not 0 <= power <= _MOST_POWER:
        raise keys.fail("fp16.initial_scale_power", f"a power of 2 from 0 to {_MOST_POWER}")
    if keys.precision() != "fp16":
        return {}
    return {"options.initial_loss_scale": fixed or 2.0**power, "options.dynamic_loss_scale": not fixed}


def _clipping(keys: _Keys, path: str) -> Mapping[str, Any]:
    norm = keys.number(path)
    return {"max_grad_norm": norm} if norm > 0 else {}


def _rate(keys: _Keys, path: str) -> Mapping[str, Any]:
    """Return the learning rate: that of DeepSpeed's schedule takes the place of its optimizer's."""
    del path
    return {"training.learning_rate": keys.number(f"{_SCHEDULE}.warmup_max_lr", keys.number(f"{_ADAM}.lr"))}


def _betas(keys: _Keys, path: str) -> Mapping[str, Any]:
    value = keys.get(path)
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(beta, int | float) for beta in value):
        raise keys.fail(path, "two numbers")
    return {"training.adam_beta1": value[0], "training.adam_beta2": value[1]}


def _optimizer_type(keys: _Keys, path: str) -> Mapping[str, Any]:
    name = str(keys.get(path)).lower()
    if name == "adam" and not keys.flag(f"{_ADAM}.adam_w_mode", True):
        return {"note": "torch.optim.Adam, in a loop of your own"}
    if name in ("adam", "adamw"):
        return {}
    return {"note": _OPTIMIZERS.get(name, "prepare() says which optimizers it takes")}


def _schedule_type(keys: _Keys, path: str) -> Mapping[str, Any]:
    kind = _SCHEDULES.get(str(keys.get(path)))
    if kind is None:
        return {"note": "any scheduler of torch works, after prepare()"}
    is_linear = keys.get(f"{_SCHEDULE}.warmup_type") == "linear"
    note = {} if is_linear else {"note": f"{kind} of TrainingArguments warms up linearly, and this one by a logarithm"}
    return {"training.lr_scheduler_type": kind, **note}


def _mixed_precision(keys: _Keys, path: str) -> Mapping[str, Any]:
    note = {"note": "there is no fp8 here, and bf16 is next"} if keys.get(path) == "fp8" else {}
    return {"precision": keys.choice(path, _PRECISIONS), **note}


def _kind(keys: _Keys, path: str) -> Mapping[str, Any]:
    is_other = str(keys.get(path)).upper() in ("MEGATRON_LM", "XLA", "TPU")
    return {"note": "there is neither Megatron nor a TPU here"} if is_other else {}


def _processes(keys: _Keys, path: str) -> Mapping[str, Any]:
    return {"launch.nproc-per-node": int(keys.number(path)) // max(1, int(keys.number("num_machines", 1)))}


def _sharding(keys: _Keys, path: str) -> Mapping[str, Any]:
    """Return the stage of FSDP 1 or 2, and the mesh of a strategy that shards inside each host alone."""
    del path
    version_1, version_2 = f"{_FSDP}.fsdp_sharding_strategy", f"{_FSDP}.fsdp_reshard_after_forward"
    if keys.number(f"{_FSDP}.fsdp_version", 1) >= 2:
        return {"stage": 3 if keys.flag(version_2, True) else 2}
    name = version_1 if keys.get(version_1) is not None else version_2
    stage, is_hybrid = keys.choice(name, _STRATEGIES, (3, False))
    hosts, ranks = int(keys.number("num_machines", 1)), int(keys.number("num_processes"))
    if not is_hybrid or hosts < 2:
        return {"stage": stage}
    if not ranks or ranks % hosts:
        raise keys.fail("num_processes", "the number of ranks, a multiple of num_machines")
    return {"stage": stage, "mesh": (hosts, ranks // hosts)}


def _units(keys: _Keys, path: str) -> Mapping[str, Any]:
    value = keys.get(path)
    names = value if isinstance(value, list) else str(value).split(",")
    return {"units": [str(name).strip() for name in names if str(name).strip()]}


def _elsewhere(keys: _Keys, path: str) -> Mapping[str, Any]:
    """Return nothing: it is read together with other keys."""
    del keys, path
    return {}


def _number(target: str, kind: Callable[[float], float] = float) -> Rule:
    return lambda keys, path: {target: kind(keys.number(path))}


def _choice(target: str, choices: Mapping[str, Any]) -> Rule:
    return lambda keys, path: {target: keys.choice(path, choices)}


def _if_on(value: Any, *targets: str) -> Rule:
    """Make the rule of a switch."""
    return lambda keys, path: dict.fromkeys(targets, value) if keys.flag(path) else {}


def _fixed(here: float) -> Rule:
    """Make the rule of a number that cannot be chosen here."""
    return lambda keys, path: {} if keys.number(path) == here else {"note": f"it is {here:g} here"}


def _launch(option: str) -> Rule:
    return lambda keys, path: {f"launch.{option}": keys.get(path)}


#: The keys that matter: of DeepSpeed, of accelerate's launcher, of its block for FSDP 1 and 2.
RULES: Mapping[str, Rule] = {
    f"{_ZERO}.stage": _elsewhere,
    f"{_ZERO}.offload_param.device": _params,
    f"{_ZERO}.cpu_offload_param": _params,
    f"{_ZERO}.offload_optimizer.device": _optimizer,
    f"{_ZERO}.offload_optimizer.ratio": _optimizer,
    f"{_ZERO}.cpu_offload": _optimizer,
    f"{_ZERO}.offload_param.nvme_path": _folders,
    f"{_ZERO}.offload_optimizer.nvme_path": _folders,
    f"{_ZERO}.stage3_max_live_parameters": _bytes("live_bytes", least=1),
    f"{_ZERO}.stage3_prefetch_bucket_size": _bytes("prefetch_bytes"),
    f"{_ZERO}.stage3_param_persistence_threshold": _bytes("persistent_bytes"),
    f"{_ZERO}.zero_quantized_weights": _if_on("int8", "options.gather_format"),
    f"{_ZERO}.zero_quantized_gradients": _if_on("int4", "options.reduce_format"),
    f"{_ZERO}.zero_hpz_partition_size": _secondary,
    "bf16.enabled": _elsewhere,
    "bf16.bf16_master_weights_and_grads": _if_on("none", "master"),
    "bf16.bf16_optimizer_states": _if_on("bf16", "options.state_dtype"),
    "fp16.enabled": _elsewhere,
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": _loss_scale,
    "fp16.loss_scale_window": _fixed(2000),
    "fp16.hysteresis": _fixed(1),
    "fp16.min_loss_scale": _fixed(1),
    "communication_data_type": _choice("reduce_dtype", _DTYPES),
    "data_types.grad_accum_dtype": _choice("grad_accumulation_dtype", _DTYPES),
    "gradient_allreduce_op": _choice("options.reduce_op", {"mean": "mean", "sum": "sum"}),
    "gradient_clipping": _clipping,
    "activation_checkpointing.cpu_checkpointing": _if_on("cpu", "placement.activations"),
    "train_micro_batch_size_per_gpu": _number("training.per_device_train_batch_size", int),
    "gradient_accumulation_steps": _number("training.gradient_accumulation_steps", int),
    "optimizer.type": _optimizer_type,
    f"{_ADAM}.lr": _rate,
    f"{_ADAM}.betas": _betas,
    f"{_ADAM}.eps": _number("training.adam_epsilon"),
    f"{_ADAM}.weight_decay": _number("training.weight_decay"),
    "scheduler.type": _schedule_type,
    f"{_SCHEDULE}.warmup_min_lr": _fixed(0),
    f"{_SCHEDULE}.warmup_max_lr": _rate,
    f"{_SCHEDULE}.warmup_num_steps": _number("training.warmup_steps", int),
    f"{_SCHEDULE}.total_num_steps": lambda keys, path: {"note": "max_steps or num_train_epochs has it"},
    "distributed_type": _kind,
    "mixed_precision": _mixed_precision,
    "num_processes": _processes,
    "num_machines": _launch("nnodes"),
    "machine_rank": _launch("node-rank"),
    "main_process_ip": _launch("master-addr"),
    "main_process_port": _launch("master-port"),
    "rdzv_backend": _launch("rdzv-backend"),
    f"{_FSDP}.fsdp_version": _elsewhere,
    f"{_FSDP}.fsdp_sharding_strategy": _sharding,
    f"{_FSDP}.fsdp_reshard_after_forward": _sharding,
    f"{_FSDP}.fsdp_offload_params": _if_on("cpu", "placement.params", "placement.grads", "placement.optimizer"),
    f"{_FSDP}.fsdp_transformer_layer_cls_to_wrap": _units,
    f"{_FSDP}.fsdp_transformer_cls_names_to_wrap": _units,
    f"{_FSDP}.fsdp_activation_checkpointing": _if_on(True, "training.gradient_checkpointing"),
    f"{_FSDP}.fsdp_activation_checkpointing_offload": _if_on("cpu", "placement.activations"),
    f"{_FSDP}.fsdp_mixed_precision_policy.reduce_dtype": _choice("reduce_dtype", _DTYPES),
}
#: Keys that DeepSpeed reads at stage 3 alone.
_OF_STAGE_3 = (f"{_ZERO}.stage3_*", f"{_ZERO}.zero_*")
_UNREAD: Mapping[str, str] = {
    "": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather allgather_size aio.* checkpoint.* "
    "prescale_gradients gradient_predivide_factor train_batch_size activation_checkpointing.* steps_per_print "
    "wall_clock_breakdown memory_breakdown dump_state log_level bf16.immediate_grad_update fp16.auto_cast "
    "fp16.consecutive_hysteresis optimizer.params.adam_w_mode optimizer.params.torch_adam optimizer.legacy_fusion "
    "optimizer.params.fp32_optimizer_states optimizer.params.set_grad_none optimizer.params.foreach disable_python_gc "
    "optimizer.params.ns_method managed_gradient_accumulation vocabulary_size data_types.keep_in_fp32_modules "
    "scheduler.params.warmup_type compute_environment same_network main_training_function debug "
    "enable_cpu_affinity use_cpu gpu_ids downcast_bf16 tpu_* command_file commands",
    f"{_ZERO}.": "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce overlap_comm "
    "allgather_partitions allgather_bucket_size round_robin_gradients sub_group_size offload_*.pin_memory "
    "offload_*.buffer_* offload_*.pipeline_* offload_*.fast_init cpu_offload_use_pin_memory load_from_fp32_weights "
    "elastic_checkpoint ignore_unused_parameters legacy_stage1 parameter_alignment memory_efficient_linear "
    "compute_grad_norm pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "stage3_gather_*_weights_on_model_save stage3_max_reuse_distance stage3_module_granularity_threshold "
    "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params",
    f"{_BLOCK}.": "zero3_init_flag zero3_save_16bit_model deepspeed_multinode_launcher",
    f"{_FSDP}.fsdp_": "auto_wrap_policy backward_prefetch* forward_prefetch limit_all_gathers use_orig_params "
    "state_dict_type sync_module_states cpu_ram_efficient_loading min_num_params mixed_precision_policy.param_dtype "
    "mixed_precision_policy.cast_forward_inputs",
}
#: Patterns of keys that ask for what happens anyway, or for nothing that changes the result.
NOT_NEEDED = tuple(f"{block}{name}" for block, names in _UNREAD.items() for name in names.split())
#: The keys of accelerate's own block for DeepSpeed, as DeepSpeed has them.
_TRANSLATED: Mapping[str, str] = {
    f"{_BLOCK}.zero_stage": f"{_ZERO}.stage",
    f"{_BLOCK}.offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    f"{_BLOCK}.offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    f"{_BLOCK}.offload_param_device": f"{_ZERO}.offload_param.device",
    f"{_BLOCK}.offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    f"{_BLOCK}.gradient_accumulation_steps": "gradient_accumulation_steps",
    f"{_BLOCK}.gradient_clipping": "gradient_clipping",
}


def convert_file(path: str | PathLike[str]) -> Converted:
    """Convert the configuration in a file: accelerate's, in YAML or JSON, or DeepSpeed's.

    Raises:
        ConfigError: the file is not read, or a value is not valid. The message names the file and the key.

    Example:
        >>> convert_file("ds_config.json").arguments  # doctest: +SKIP
    """
    path = Path(path)
    config = read_mapping(path)
    if _OF_ACCELERATE & config.keys():
        return convert_accelerate(config, source=str(path), folder=path.parent)
    return convert_deepspeed(config, source=str(path))


def convert_deepspeed(config: Mapping[str, Any], *, source: str = "The configuration of DeepSpeed") -> Converted:
    """Convert a configuration of DeepSpeed.

    Arguments:
        config: the content of its file.
        source: the name of the configuration in messages.

    Raises:
        ConfigError: it is no mapping, or a value is not valid. The message names the key.

    Example:
        >>> convert_deepspeed({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}).arguments
        {'stage': 2, 'precision': 'bf16', 'max_grad_norm': 1.0}
    """
    leaves = {path.replace("bfloat16.", "bf16."): value for path, value in _leaves(config, source)}
    keys = _Keys(source, leaves)
    clipping = 1.0 if leaves.get("gradient_clipping") is None else None
    return _convert(keys, {"stage": keys.stage(), "precision": keys.precision(), "max_grad_norm": clipping})


def convert_accelerate(
    config: Mapping[str, Any], *, source: str = "The configuration of accelerate", folder: Path = Path()
) -> Converted:
    """Convert a configuration of accelerate.

    Arguments:
        config: the content of its file.
        source: the name of the configuration in messages.
        folder: the folder of the file: a `deepspeed_config_file` that is not where it says is looked for there.

    Raises:
        ConfigError: it is no mapping, a value is not valid, or a file that it names is not read.

    Example:
        >>> converted = convert_accelerate({"distributed_type": "FSDP", "mixed_precision": "bf16"})
        >>> converted.arguments
        {'stage': 3, 'precision': 'bf16'}
    """
    leaves = dict(_leaves(config, source))
    kind = str(leaves.get("distributed_type", "FSDP" if _FSDP in config else "no")).upper()
    read = {"FSDP": _FSDP, "DEEPSPEED": _BLOCK}.get(kind)
    leaves = {path: value for path, value in leaves.items() if path.partition(".")[0] not in {_FSDP, _BLOCK} - {read}}
    if kind != "DEEPSPEED":
        return _convert(_Keys(source, leaves), {"stage": 3 if kind == "FSDP" else 0, "precision": "fp32"})
    inside = {f"{_ZERO}.stage": 2, **{_TRANSLATED[path]: leaves[path] for path in leaves if path in _TRANSLATED}}
    if (file := leaves.pop(_FILE, None)) is not None:
        source = str(file if Path(str(file)).is_file() else folder / str(file))
        inside = dict(_leaves(read_mapping(Path(source)), source))
    wanted = _Keys(source, leaves).choice("mixed_precision", _PRECISIONS, "fp32")
    for name in ("bf16", "fp16"):  # left open, they are what accelerate says
        enabled = inside.get(f"{name}.enabled")
        if enabled in (None, _AUTO):
            inside[f"{name}.enabled"] = wanted == name
        elif str(enabled).lower() == "true" and wanted not in ("fp32", name):
            raise ConfigError(
                f"{source}: mixed_precision is {wanted}, and DeepSpeed's configuration has {name} on. Say one."
            )
    around = {path: value for path, value in leaves.items() if path not in {*_TRANSLATED, "mixed_precision"}}
    return convert_deepspeed({**around, **inside}, source=source)


def _leaves(config: Any, source: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key that holds no further keys."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} is a {type(config).__name__}. Give the mapping that its file holds.")
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, source, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _convert(keys: _Keys, defaults: Mapping[str, Any]) -> Converted:
    """Apply the rules to all keys of a configuration.

    Arguments:
        keys: the configuration.
        defaults: arguments of `prepare` that it leaves out; `None` for none.
    """
    made = {name: value for name, value in defaults.items() if value is not None}
    notes = []
    for path, value in keys.leaves.items():
        enabled = keys.leaves.get(f"{path.rpartition('.')[0]}.enabled")
        if str(enabled).lower() == "false" or value in (None, "", [], {}):
            continue
        if path not in RULES:
            if not _matches(path, NOT_NEEDED):
                notes.append(Note(path, value, "unknown", _NOTHING))
        elif value == _AUTO:
            notes.append(Note(path, value, "auto", "Trainer fills it in; in a loop of your own, write a value"))
        else:
            found = dict(RULES[path](keys, path))
            if "note" in found:
                notes.append(Note(path, value, "no counterpart", found.pop("note")))
            if keys.stage() == 3 or not _matches(path, _OF_STAGE_3):
                made |= found
    parts: dict[str, dict[str, Any]] = {"": {}, "placement": {}, "options": {}, "training": {}, "launch": {}}
    for target, value in made.items():
        part, _, name = target.rpartition(".")
        parts[part][name] = value
    mesh = parts[""].pop("mesh", None)
    blocks = {part: parts[part] for part in ("placement", "options") if parts[part]}
    return Converted({**parts[""], **blocks}, tuple(notes), parts["training"], parts["launch"], mesh)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def prepare_call(converted: Converted) -> str:
    """Write the call of `prepare` as Python: it needs `torch`, `penstock`, a `model` and an `optimizer`.

    Example:
        >>> print(prepare_call(Converted({"stage": 2, "precision": "bf16"}, ())))
        optimizer = penstock.prepare(
            model,
            optimizer,
            stage=2,
            precision='bf16',
        )
    """
    lines = [f"{name}={_python(name, value)}" for name, value in converted.arguments.items()]
    if converted.mesh is not None:
        lines.append(f"mesh=torch.distributed.device_mesh.init_device_mesh('cuda', {converted.mesh})")
    inside = [f"    {line}," for line in ("model", "optimizer", *lines)]
    return "\n".join(("optimizer = penstock.prepare(", *inside, ")"))


def _python(name: str, value: Any) -> str:
    """Write an argument as Python."""
    if name in ("placement", "options"):
        return f"penstock.{name.capitalize()}({', '.join(f'{key}={item!r}' for key, item in value.items())})"
    if name.endswith("_dtype"):
        return {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[value]
    if name == "units":  # by name: the classes need not be imported
        return f"lambda name, module: type(module).__name__ in {value!r}"
    return repr(value)


def train_file(converted: Converted) -> dict[str, Any]:
    """Return the content of a YAML file of `penstock train`: fields of TRL, and the block `penstock`."""
    arguments = converted.arguments
    fields = {name: arguments[name] for name in ("max_grad_norm",) if name in arguments}
    if "precision" in arguments:
        fields |= {name: arguments["precision"] == name for name in ("bf16", "fp16")}
    block = {name: arguments[name] for name in ("stage", "options") if name in arguments}
    placement = {**dict.fromkeys(("params", "grads", "optimizer"), "device"), **arguments.get("placement", {})}
    for name, place in placement.items():  # all three: optimizer state is on the cpu there unless a file says more
        shares = place.items() if isinstance(place, Mapping) else ()
        block[name] = ",".join(f"{tier}={share}" for tier, share in shares) or place
    if isinstance(block.get("nvme_path"), str):
        block["nvme_path"] = [block["nvme_path"]]
    if converted.mesh is not None:
        block["dp_replicate"] = converted.mesh[0]
    return {**fields, **converted.training, "penstock": block}


def report(converted: Converted, config: str) -> str:
    """Write a YAML file for `penstock train`, and as comments a command, the call of `prepare` and the notes.

    Arguments:
        converted: the configuration.
        config: the file of arguments that `penstock launch` reads.
    """
    options = "".join(f" --{name} {value}" for name, value in {"nproc-per-node": "N", **converted.launch}.items())
    lines = [
        "",
        one_line(
            f"Trainer's scripts: torchrun{options} -m penstock launch --config {config} train.py", _MOST_LINE_CHARS
        ),
    ]
    own = [name for name in _OF_PREPARE if name in converted.arguments]
    lines += [f"Of prepare() alone: {', '.join(own)}"] if own else []
    lines += ["A loop of your own:", *(f"    {line}" for line in prepare_call(converted).splitlines())]
    headings = {"no counterpart": "Without a counterpart", "unknown": "Unknown", "auto": "Left open"}
    for verdict, heading in headings.items():
        notes = [f"    {note}" for note in converted.notes if note.verdict == verdict]
        lines += [f"{heading}:", *notes] if notes else []
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    return f"# penstock train --config: beside TRL's other fields\n{yaml_of(train_file(converted))}{comments}"
