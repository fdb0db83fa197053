"""accelerate's configuration: its launcher, its FSDP (versions 1 and 2) and its DeepSpeed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files import read_mapping
from penstock.integrations.convert.converted import Converted, Note
from penstock.integrations.convert.deepspeed import convert_deepspeed
from penstock.integrations.convert.fsdp import FSDP_ROWS, STRATEGIES
from penstock.integrations.convert.rows import (
    UNKNOWN,
    Keys,
    Row,
    Says,
    argument,
    convert,
    in_order,
    loop,
    no_counterpart,
    not_needed,
)

_PRECISIONS = {"no": "fp32", "false": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_BLOCK = "deepspeed_config"
_FILE = "deepspeed_config_file"
#: The keys of accelerate's own block for DeepSpeed, as DeepSpeed has them.
_TRANSLATED: Mapping[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_DEFAULT_STAGE = 2


def convert_accelerate(
    config: Mapping[str, Any], *, source: str = "The configuration of accelerate", folder: Path = Path()
) -> Converted:
    """Convert a configuration of accelerate.

    Arguments:
        config: what its file holds.
        source: what to call it in messages.
        folder: where the file lies: a `deepspeed_config_file` that is not where it says is looked for there.

    Raises:
        ConfigError: it is no mapping, a value is not what its key takes, or a file that it names is not read.

    Example:
        >>> converted = convert_accelerate({"distributed_type": "FSDP", "mixed_precision": "bf16"})
        >>> converted.arguments
        {'stage': 3, 'precision': 'bf16'}
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source} is a {type(config).__name__}. Give the mapping that its file holds.")
    keys = Keys(source, config)
    if str(keys.get("distributed_type")).upper() == "DEEPSPEED":
        return _with_deepspeed(keys, folder)
    converted = convert(keys, ROWS, {})
    unsaid: dict[str, Any] = {}
    notes = []
    if "precision" not in converted.arguments:
        unsaid["precision"] = "fp32"
        notes.append(Note("mixed_precision", None, "argument", "precision='fp32'; accelerate's default"))
    if "stage" not in converted.arguments:
        is_fsdp = str(keys.get("distributed_type")).upper() == "FSDP"
        unsaid["stage"] = 3 if is_fsdp else 0
        why = "FSDP's default" if is_fsdp else "nothing is sharded without FSDP"
        notes.append(Note("distributed_type", None, "argument", f"stage={unsaid['stage']}; {why}"))
    return replace(converted, arguments=in_order({**unsaid, **converted.arguments}), notes=(*converted.notes, *notes))


def _with_deepspeed(keys: Keys, folder: Path) -> Converted:
    """Convert the block of DeepSpeed, or the file that it names, and what is around it."""
    block = keys.get(_BLOCK, {})
    config = dict(keys.config)
    if isinstance(block, Mapping) and block.get(_FILE):
        inside = dict(read_mapping(_find(str(block[_FILE]), folder)))
        names: Mapping[str, str] = {}
        prefix = f"{_BLOCK}.{_FILE}: "
    else:
        inside, names = _translate(block if isinstance(block, Mapping) else {})
        prefix = ""
        config[_BLOCK] = {name: value for name, value in block.items() if name not in _TRANSLATED} or None
    filled = _fill_precision(inside, keys)
    own = convert(Keys(keys.source, {key: value for key, value in config.items() if value is not None}), ROWS, {})
    found = convert_deepspeed(inside, source=keys.source if not prefix else str(block[_FILE]))
    notes = [
        replace(note, key=names.get(note.key, prefix + note.key))
        for note in found.notes
        if note.key.partition(".")[0] not in filled
    ]
    # What the file of DeepSpeed says of the precision counts, and what accelerate says fills its gaps.
    arguments = {name: value for name, value in own.arguments.items() if name not in ("stage", "precision")}
    return Converted(
        in_order({**arguments, **found.arguments}),
        (*own.notes, *notes),
        {**own.training, **found.training},
        own.launch,
        own.mesh,
    )


def _translate(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Write accelerate's block as a configuration of DeepSpeed; and say by DeepSpeed's keys what they were."""
    inside: dict[str, Any] = {"zero_optimization": {"stage": _DEFAULT_STAGE}}
    names = {path: f"{_BLOCK}.{name}" for name, path in _TRANSLATED.items()}
    for name, path in _TRANSLATED.items():
        if block.get(name) is not None:
            *holders, last = path.split(".")
            place = inside
            for holder in holders:
                place = place.setdefault(holder, {})
            place[last] = block[name]
    return inside, names


def _fill_precision(inside: dict[str, Any], keys: Keys) -> set[str]:
    """Fill in the precision as accelerate does; returns the blocks that the configuration did not have."""
    wanted = str(keys.get("mixed_precision", "no")).lower().replace("fp8", "bf16")
    filled = {name for name in ("bf16", "fp16") if name not in inside}
    for name in ("bf16", "fp16"):
        block = dict(inside.get(name) or {})
        if block.get("enabled") in (None, "auto"):
            block["enabled"] = wanted == name
        elif block["enabled"] and wanted not in ("no", name):
            raise ConfigError(
                f"{keys.source}: mixed_precision is {wanted}, and DeepSpeed's configuration has {name} on. Say one."
            )
        inside[name] = block
    return filled


def _find(name: str, folder: Path) -> Path:
    """Find a file where it is said to be, or beside the one that names it."""
    return Path(name) if Path(name).is_file() else folder / name


def _mixed_precision(value: Any, keys: Keys) -> Says:
    precision = keys.one_of("mixed_precision", value, _PRECISIONS)
    if str(value).lower() == "fp8":
        return Says("no counterpart", "there is no fp8 here", {"precision": precision})
    if str(keys.get("distributed_type")).upper() == "DEEPSPEED":
        return Says("argument", f"{precision!r} where the configuration of DeepSpeed does not say its own")
    return argument("precision", precision)


def _distributed_type(value: Any, keys: Keys) -> Says:
    kind = str(value).upper()
    if kind == "FSDP":
        if any(keys.get(f"fsdp_config.{name}") is not None for name in STRATEGIES):
            return loop("the arguments are those of fsdp_config")
        return argument("stage", 3, "which is FSDP's default")
    if kind == "DEEPSPEED":
        return loop("the arguments are those of the configuration of DeepSpeed")
    if kind in ("MEGATRON_LM", "XLA", "TPU"):
        return no_counterpart("there is neither tensor nor pipeline parallelism here, nor a TPU")
    return argument("stage", 0, "nothing is sharded; stage=3 would shard all")


def _launch(option: str) -> Row:
    return lambda value, keys: Says("loop", f"--{option} {value}", launch={option: value})


def _processes(value: Any, keys: Keys) -> Says:
    machines = int(keys.number("num_machines", 1))
    each = int(keys.as_number("num_processes", value)) // max(1, machines)
    return Says("loop", f"--nproc-per-node {each}", launch={"nproc-per-node": each})


_TPU = no_counterpart("there is no TPU here")
ROWS: Mapping[str, Row] = {
    **FSDP_ROWS,
    "compute_environment": not_needed("any machine with torchrun"),
    "distributed_type": _distributed_type,
    "mixed_precision": _mixed_precision,
    "num_processes": _processes,
    "num_machines": _launch("nnodes"),
    "machine_rank": _launch("node-rank"),
    "main_process_ip": _launch("master-addr"),
    "main_process_port": _launch("master-port"),
    "rdzv_backend": _launch("rdzv-backend"),
    "gpu_ids": loop("CUDA_VISIBLE_DEVICES says which"),
    "use_cpu": loop("the device is where the model lies: leave it on the cpu, and hide the others"),
    "same_network": not_needed("torchrun asks nothing like it"),
    "main_training_function": not_needed("it is for notebooks"),
    "enable_cpu_affinity": not_needed("threads are bound to the device's NUMA node where nobody has bound them"),
    "debug": not_needed("ranks always compare what they issue"),
    "downcast_bf16": _TPU,
    **{f"tpu_{name}": _TPU for name in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "command_file": _TPU,
    "commands": _TPU,
    "dynamo_backend": loop("compile the model with torch.compile after prepare()"),
    "dynamo_config.*": loop("compile the model with torch.compile after prepare()"),
    "fp8_config.*": no_counterpart("there is no fp8 here"),
    "megatron_lm_config.*": no_counterpart("there is neither tensor nor pipeline parallelism here"),
    "parallelism_config.*": no_counterpart("a mesh of two dimensions (replicate, shard) is all there is"),
    "mpirun_config.*": loop("start one process for each rank as before; RANK and WORLD_SIZE are read"),
    "fp16": lambda value, keys: argument("precision", "fp16" if keys.as_flag("fp16", value) else "fp32"),
    **{
        f"{_BLOCK}.{name}": not_needed(f"accelerate reads {_FILE} in its place, and refuses both")
        for name in _TRANSLATED
    },
    f"{_BLOCK}.{_FILE}": loop("its keys are below"),
    f"{_BLOCK}.zero3_init_flag": loop("make the model on the meta device, and prepare(weights=) reads it unit by unit"),
    f"{_BLOCK}.deepspeed_multinode_launcher": loop("torchrun on each host"),
    f"{_BLOCK}.deepspeed_hostfile": loop("torchrun on each host"),
    f"{_BLOCK}.deepspeed_exclusion_filter": loop("torchrun on the hosts that take part"),
    f"{_BLOCK}.deepspeed_inclusion_filter": loop("torchrun on the hosts that take part"),
    f"{_BLOCK}.deepspeed_moe_layer_cls_names": loop("say which modules are gathered as one: prepare(units=)"),
    f"{_BLOCK}.*": lambda value, keys: (
        UNKNOWN
        if str(keys.get("distributed_type")).upper() == "DEEPSPEED"
        else not_needed("distributed_type is not DEEPSPEED")
    ),
}
