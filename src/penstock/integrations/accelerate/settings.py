"""What accelerate and Penstock are both told: one precision, one way to shard. Checked before anything is made."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import GradScalerKwargs

from penstock.errors import ConfigError
from penstock.integrations import _common
from penstock.integrations._common import ComputePrecision

#: accelerate's names of precisions, by Penstock's.
PRECISIONS: Mapping[ComputePrecision, str] = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_MIXED = "ACCELERATE_MIXED_PRECISION"
_OTHERS: Mapping[str, str] = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
_PLUGINS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)


def check_alone(arguments: Mapping[str, Any]) -> None:
    """Refuse another library, or a way of accelerate's own, that would shard or scale the same model.

    Arguments:
        arguments: those of `Accelerator`, by name.

    Raises:
        ConfigError: names what was set, and where.
    """
    for variable, name in _OTHERS.items():
        if os.environ.get(variable, "false").lower() in ("true", "1", "yes"):
            raise ConfigError(
                f"{variable} is set: the configuration that this was launched with (accelerate config) uses {name}, "
                "and the model would be sharded twice. `penstock convert-config FILE` says what the same is here; "
                "launch without it."
            )
    for plugin in _PLUGINS:
        if arguments.get(plugin) is not None:
            raise ConfigError(
                f"PenstockAccelerator({plugin}=): Penstock shards the model alone. Leave it out; `penstock "
                "convert-config FILE` says what the same is here."
            )
    for handler in arguments.get("kwargs_handlers") or ():
        if isinstance(handler, GradScalerKwargs):
            raise ConfigError(
                "GradScalerKwargs: there is no GradScaler. Use penstock={'options': {'initial_loss_scale': ..., "
                "'dynamic_loss_scale': ...}}."
            )


def choose_precision(arguments: Mapping[str, Any], prepare: Mapping[str, Any]) -> ComputePrecision | None:
    """Choose the one precision of both.

    What `penstock=` says counts, then `mixed_precision=`, then the launcher's variable.

    Arguments:
        arguments: those of `Accelerator`, by name.
        prepare: those of `penstock.prepare`.

    Returns:
        Penstock's name of it; `None` where nobody says one.

    Raises:
        ConfigError: two that contradict each other; fp8.
    """
    given, launched = arguments.get("mixed_precision"), os.environ.get(_MIXED, "").lower()
    # "no" is what launchers say where nothing was chosen, so it contradicts nobody.
    where = f"mixed_precision={str(given)!r}" if given is not None else f"{_MIXED}={launched}"
    theirs = str(given).lower() if given is not None else launched if launched not in ("", "no") else None
    names = {name: precision for precision, name in PRECISIONS.items()}
    if theirs is not None and theirs not in names:
        raise ConfigError(f"{where}: use 'no' (fp32), 'bf16' or 'fp16'.")
    return _common.choose_precision(prepare.get("precision"), None if theirs is None else names[theirs], source=where)


def check_machine(device: torch.device, world_size: int, given_mesh: Any) -> None:
    """Refuse an accelerate that sees another device, or other ranks, than Penstock would.

    Arguments:
        device: accelerate's.
        world_size: accelerate's number of processes.
        given_mesh: the `mesh` of `penstock.prepare`, if there is one.

    Raises:
        ConfigError: says what to set.
    """
    if device.type == "cpu" and torch.accelerator.is_available() and getattr(given_mesh, "device_type", "") != "cpu":
        raise ConfigError(
            "Accelerator(cpu=True), or ACCELERATE_USE_CPU, on a machine with an accelerator, which Penstock would "
            "take. Hide it (CUDA_VISIBLE_DEVICES=''), or give penstock={'mesh': ...} a DeviceMesh of cpus."
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != world_size:
        raise ConfigError(
            f"accelerate counts {world_size} processes, and torch.distributed has {ranks}: dataloaders would not "
            "divide the data. Make the accelerator before anything else of accelerate's; on cpus with cpu=True."
        )
