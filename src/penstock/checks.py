"""Refusals of `prepare`, before anything is allocated. A message says what, which, and what to do next."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.checkpoint.beside import persistent_buffers, why_not
from penstock.config import DEFAULT_LIVE_BYTES, Options, Placement, Precision, Tier, UnsaidPrecision, parse_home
from penstock.engine.forward_backward.guards import is_owned
from penstock.engine.unit.dtensor import check_aliases, is_divided
from penstock.engine.unit.partition import UnitSpec
from penstock.engine.unit.plan import UnitPlan
from penstock.errors import ConfigError, MemoryBudgetError
from penstock.rules.formats import COMPUTE_DTYPES
from penstock.rules.rule import Rule
from penstock.runtime.topology import Grid, roles_of
from penstock.tiers.host import bounce_bytes

MUON = "muon"
_SUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_features(
    stage: object,
    placement: object,
    precision: object,
    overlap: object,
    master: object,
    options: object,
) -> None:
    """Refuse values that do not exist, or do not go with each other.

    Raises:
        ConfigError: the message has the argument and its possible values.
    """
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(f"stage={stage!r}: use 0 (nothing sharded), 1, 2 or 3.")
    _one_of("precision", precision, tuple(COMPUTE_DTYPES))
    _one_of("overlap", overlap, ("none", "forward", "backward", "auto"))
    _one_of("master", master, ("remainder", "fp32", "none"))
    if not isinstance(options, Options):
        raise ConfigError(f"options={options!r}: give a penstock.Options.")
    if options.gather_format != "exact" and stage != 3:
        raise ConfigError(
            f"Options(gather_format={options.gather_format!r}) with stage={stage}: gathers carry codes in stage 3 "
            "alone, as each rank keeps the parameters in the others. Use stage=3 or gather_format='exact'."
        )
    if options.reduce_format != "exact" and stage == 0:
        raise ConfigError(
            f"Options(reduce_format={options.reduce_format!r}) with stage=0: sums over copies are exact, and no "
            "gradient is sharded. Use stage=1, 2 or 3, or reduce_format='exact'."
        )
    if options.secondary_shard is not None and stage != 3:
        raise ConfigError(
            f"Options(secondary_shard={options.secondary_shard}) with stage={stage}: each rank keeps all parameters, "
            "and backward gathers none. Use stage=3, or secondary_shard=None."
        )
    if not isinstance(placement, Placement):
        raise ConfigError(f"placement={placement!r}: give a penstock.Placement, 'auto' or None.")
    for what in ("params", "grads", "optimizer", "activations"):
        home = getattr(placement, what)
        if home is not None and Tier.NVME in parse_home(home, what=what) and not placement.nvme_folders():
            raise ConfigError(
                f"{what}={home!r} needs a folder for its files. Name one on a fast disk: Placement(nvme_path=...)."
            )
    if master == "none" and precision == "fp16":
        raise ConfigError(
            "master='none' with fp16 loses small updates for good. Use master='fp32' or precision='bf16'."
        )


def check_nodes(options: Options, shards: int, *, gathers: bool) -> None:
    """Refuse a `secondary_shard` that does not divide the shard ranks, or is of no use.

    Arguments:
        options: the options.
        shards: the number of ranks that share a copy of the state.
        gathers: whether any unit is gathered for each use.
    """
    size = options.secondary_shard
    if size is None:
        return
    if shards % size:
        raise ConfigError(
            f"Options(secondary_shard={size}): {shards} shard ranks are no whole nodes of {size}. Use a size that "
            f"divides {shards}, or None."
        )
    if not gathers:
        raise ConfigError(
            f"Options(secondary_shard={size}): nothing is gathered in backward, since every unit stays gathered. Lower "
            f"Options(persistent_bytes={options.persistent_bytes}), or use secondary_shard=None."
        )


def check_whole(
    model: nn.Module, rules: Mapping[nn.Parameter, Rule], specs: Sequence[UnitSpec], options: Options, grid: Grid
) -> None:
    """Refuse settings that do not go with rules that look at whole parameters.

    Arguments:
        model: the model that is trained.
        rules: the rule of each of its parameters.
        specs: its units.
        options: the options.
        grid: the ranks that share its state.
    """
    whole = [spec for spec in specs if spec.whole_numel]
    if not whole:
        return
    rule = whole[0].rule
    assert rule is not None
    left_out = unowned(model, rules)
    if left_out and {each.name for each in rules.values()} == {MUON}:
        parameter = model.get_parameter(left_out[0])
        raise ConfigError(
            f"torch.optim.Muon does not own {len(left_out)} trainable parameters; the first is '{left_out[0]}' "
            f"{tuple(parameter.shape)}. Train all of them with penstock.optim.MuonAdamW(model), or freeze them: "
            "requires_grad_(False)."
        )
    for spec in whole:
        for name, parameter in zip(spec.names, spec.parameters, strict=True):
            if is_divided(parameter):
                raise ConfigError(
                    f"Parameter '{name}' {tuple(parameter.shape)} is divided over ranks (a DTensor), and "
                    f"{rule.name} looks at whole parameters. Give it to AdamW, or do not divide it."
                )
    formats = {"gather_format": options.gather_format, "reduce_format": options.reduce_format}
    given = [f"{name}={value!r}" for name, value in formats.items() if value != "exact"]
    given += [f"secondary_shard={options.secondary_shard}"] if options.secondary_shard is not None else []
    if given and grid.shards > 1:
        raise ConfigError(
            f"{given[0]} goes by equal shards, and {rule.name} has each parameter on one rank. Leave it out."
        )


def check_dtypes(reduce_dtype: object, grad_accumulation_dtype: object) -> None:
    """Refuse dtypes in which gradients cannot be summed."""
    for what, dtype in (("reduce_dtype", reduce_dtype), ("grad_accumulation_dtype", grad_accumulation_dtype)):
        if dtype is not None and dtype not in _SUM_DTYPES:
            raise ConfigError(f"{what}={dtype!r}: use torch.float32, torch.bfloat16, torch.float16 or None.")


def check_casts(specs: Sequence[UnitSpec], precision: Precision) -> str | None:
    """Refuse to choose one compute dtype for parameters that are trained in several; report implicit casts.

    Arguments:
        specs: the units, with parameters in their original dtypes.
        precision: the compute dtype of floating-point parameters, by name.

    Returns:
        A line for the log; `None` if there is nothing to report.

    Raises:
        ConfigError: the message lists the dtypes, with a parameter of each.
    """
    compute_dtype, is_said = COMPUTE_DTYPES[precision], not isinstance(precision, UnsaidPrecision)
    of_trained, kept, cast = (dict[torch.dtype, list[str]]() for _ in range(3))
    for spec in (spec for spec in specs if spec.dtype == compute_dtype):
        for name, parameter in zip(spec.names, spec.parameters, strict=True):
            for found in (*([of_trained] if spec.trainable else []), kept if parameter.dtype == spec.dtype else cast):
                found.setdefault(parameter.dtype, []).append(name)
    if not is_said and len(of_trained) > 1:
        raise ConfigError(
            f"The model is trained in several dtypes, and no precision was said: {_listed(of_trained)}. Use "
            "prepare(precision='bf16'), 'fp16' or 'fp32', which all of them compute in; 16 bits keep fp32 masters. Or "
            "cast the model: model.float(), model.bfloat16()."
        )
    wider = {dtype: names for dtype, names in cast.items() if dtype.itemsize > compute_dtype.itemsize}
    if not is_said and wider:
        return (
            f"prepare() was told no precision, and computes {_listed(wider)} in bf16; trained ones have fp32 masters. "
            "precision='fp32' computes in fp32; precision='bf16' says that bf16 is meant."
        )
    if compute_dtype == torch.float32 and kept and cast:
        return (
            f"precision='fp32' is that of all parameters: prepare() computes {_listed(cast)} in fp32, and updates them "
            "in fp32."
        )
    return None


def _listed(found: Mapping[torch.dtype, Sequence[str]]) -> str:
    """Describe parameters by dtype: their number, and the name of the first."""
    counted = ((len(names), str(dtype).removeprefix("torch."), names[0]) for dtype, names in found.items())
    return ", ".join(f"{count} of {dtype} (such as '{name}')" for count, dtype, name in counted)


def check_clip(max_grad_norm: object, overlap: str) -> None:
    """Refuse a norm that clips everything or nothing, and a norm with updates in backward, which cannot wait for it."""
    if max_grad_norm is None:
        return
    if (
        isinstance(max_grad_norm, bool)
        or not isinstance(max_grad_norm, int | float)
        or not (max_grad_norm > 0 and math.isfinite(max_grad_norm))
    ):
        raise ConfigError(f"max_grad_norm={max_grad_norm!r}: use a finite number above 0, or None not to clip.")
    if overlap == "backward":
        raise ConfigError(
            f"max_grad_norm={max_grad_norm!r} needs the whole gradient, and overlap='backward' updates before it is "
            "there. Use overlap='forward', or max_grad_norm=None."
        )


def check_loss_scale(precision: str, overlap: str, options: Options) -> None:
    """Refuse a loss scale that updates in backward cannot wait for."""
    if precision == "fp16" and overlap == "backward" and options.dynamic_loss_scale:
        raise ConfigError(
            "overlap='backward' with precision='fp16' needs a static loss scale: a step that overflows could not be "
            "skipped whole. Use overlap='forward', or Options(dynamic_loss_scale=False, initial_loss_scale=...)."
        )


#: Class names of wrappers that train a module themselves. By name, since most of them are not imported.
WRAPPERS = frozenset(
    ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
)


def check_model(model: nn.Module, *, has_values: bool) -> None:
    """Refuse an object that is no model, a model without values, and one that is prepared already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__}: give a torch.nn.Module.")
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), None)
        if wrapper is not None:
            which = f"The model's '{name}'" if name else "model"
            inner = "model.module" if isinstance(getattr(module, "module", None), nn.Module) else "before it is sharded"
            raise ConfigError(
                f"{which} is a {wrapper}, which combines gradients itself. Give the module that it wraps ({inner})."
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"'{name}' has no shape yet. Run the model once first, so that lazy modules know their inputs."
            )
        if tensor.is_meta and has_values:
            raise ConfigError(
                f"'{name}' {tuple(tensor.shape)} is on the meta device. Say where its values come from: "
                "prepare(weights=<a folder of safetensors>), or weights='init'."
            )
    for name, buffer in persistent_buffers(model).items():
        why = why_not(buffer)
        if why is not None:
            raise ConfigError(
                f"Buffer '{name}' {why}: no checkpoint can hold it. Register it with "
                "persistent=False, if it can be made again, or keep its parts as plain buffers."
            )
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters.")
    owned = next((name for name, parameter in model.named_parameters() if is_owned(parameter)), None)
    if owned is not None:  # two engines would gather and release it
        raise ConfigError(
            f"This {type(model).__name__} is prepared already: parameter '{owned}' "
            f"{tuple(model.get_parameter(owned).shape)} has an optimizer. Parts of a model may have their own: prepare "
            "each part with its own, prepare(model.part, ...). Call close() on its optimizer before preparing it again."
        )
    check_aliases(model)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose memory is not its own, or cannot be changed."""
    if not is_divided(parameter) and type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ConfigError(
            f"Parameter '{name}' is a {type(parameter).__name__}, a tensor subclass with bytes of its own inside. "
            "Keep its parts as plain parameters (codes and scales, requires_grad=False), or leave it out of the "
            "model's parameters."
        )
    if parameter.is_inference():
        raise ConfigError(
            f"Parameter '{name}' was made in torch.inference_mode(): torch lets nobody change or train it outside. "
            "Make the model outside of it; prepare() may be called inside."
        )


def check_newcomers(newcomers: Mapping[str, nn.Parameter]) -> None:
    """Refuse new parameters of a prepared model that cannot be laid out. They are given by name."""
    for name, parameter in newcomers.items():
        _check_parameter(name, parameter)
        tensor: torch.Tensor = parameter
        is_lazy = bool(nn.parameter.is_lazy(tensor))
        shape = "no shape yet" if is_lazy else tuple(parameter.shape)
        if is_lazy or parameter.is_meta:
            raise ConfigError(f"Parameter '{name}' ({shape}) has no values: initialise it before add_param_group().")
        if is_owned(parameter):
            raise ConfigError(f"Parameter '{name}' {shape} has an optimizer of its own: another prepared model's.")
        if parameter.grad is not None:
            raise ConfigError(f"Parameter '{name}' {shape} has a gradient already, which no step would see. Drop it.")


def check_ranks(mesh: DeviceMesh | None) -> None:
    """Refuse a process group that contradicts the launcher or the mesh."""
    initialised = dist.is_available() and dist.is_initialized()
    if mesh is not None:
        roles_of(mesh)
        return
    announced = os.environ.get("WORLD_SIZE")
    if announced is None:
        return
    actual = dist.get_world_size() if initialised else 1
    if not announced.isdigit() or int(announced) != actual:
        found = f"the process group has {actual} ranks" if initialised else "torch.distributed is not initialised"
        raise ConfigError(
            f"WORLD_SIZE={announced}, but {found}. Call torch.distributed.init_process_group() before prepare(), "
            "with the launcher's world size, or unset WORLD_SIZE."
        )


def check_ownership(model: nn.Module, owned: Mapping[nn.Parameter, int]) -> None:
    """Refuse an optimizer with parameters that are not the model's.

    Arguments:
        model: the model.
        owned: the parameters of the optimizer, each with the number of its group.

    Raises:
        ConfigError: the message has their number, and the shape of the first.
    """
    of_model = set(model.parameters())
    strangers = [p for p in owned if p not in of_model]
    if strangers:
        raise ConfigError(
            f"{len(strangers)} of the optimizer's {len(owned)} parameters are not the model's; the first has shape "
            f"{tuple(strangers[0].shape)} in group {owned[strangers[0]]}. Build the optimizer from model.parameters() "
            "after the model has its final modules."
        )


def unowned(model: nn.Module, owned: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of trainable parameters that the optimizer does not own."""
    known = set(owned)
    return [name for name, p in model.named_parameters() if p.requires_grad and p not in known]


def check_no_gradients(model: nn.Module) -> None:
    """Refuse a model with gradients: no step would use them."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ConfigError(
                f"Parameter '{name}' has a gradient already. Call zero_grad() or step() before prepare()."
            )


def check_live_bytes(units: Sequence[UnitPlan], options: Options) -> int:
    """Refuse a budget of gathered parameters that is too small for the largest unit.

    A unit is gathered together with those whose forward it is part of, and with those of the same forward.

    Arguments:
        units: their plans.
        options: the options, with the budget.

    Returns:
        The budget in bytes: the default one grows to what is needed.

    Raises:
        MemoryBudgetError: the message has the unit, and the missing bytes.
    """
    # A unit in use is gathered at any budget: one that is too small would be exceeded silently.
    need, name = most_needed([(plan.spec, plan.full_bytes) for plan in units])
    if options.live_bytes >= need:
        return options.live_bytes
    if options.live_bytes == DEFAULT_LIVE_BYTES:  # the default grows
        return need
    raise MemoryBudgetError(
        f"Options(live_bytes={options.live_bytes:,}) is {need - options.live_bytes:,} bytes too small: unit '{name}' "
        f"and the units around it take {need:,} bytes when gathered. Raise live_bytes, or choose smaller units."
    )


def most_needed(units: Sequence[tuple[UnitSpec, int]]) -> tuple[int, str]:
    """Find the unit that takes the most bytes when it is gathered, with the units around it.

    Arguments:
        units: the units, each with the bytes that it takes when gathered.

    Returns:
        The bytes, and the unit's name.
    """
    hooked_modules = {module for spec, _ in units for module in spec.hooked_modules}
    around: dict[nn.Module, dict[int, int]] = {
        module: {} for module in hooked_modules
    }  # gathered throughout its forward
    for number, (spec, nbytes) in enumerate(units):
        for module in hooked_modules & {*spec.hooked_modules, *spec.inside}:
            around[module][number] = nbytes
    needs = []
    for number, (spec, nbytes) in enumerate(units):
        gathered = {number: nbytes}
        for module in spec.hooked_modules:
            gathered |= around[module]
        needs.append((sum(gathered.values()), spec.name))
    return max(needs)


def check_pinned_memory(copied: int, rings: int, device: torch.device, options: Options) -> None:
    """Refuse a budget of pinned memory that is smaller than the rings of buffers of the cpu tier.

    Arguments:
        copied: the bytes of the cpu tier that a device copies, which are pinned if the budget allows it.
        rings: the bytes of the rings.
        device: the device that copies.
        options: the options, with the budget of pinned memory.

    Raises:
        MemoryBudgetError: the message has the missing bytes.
    """
    least, budget = rings + bounce_bytes(options.tile_bytes), options.pinned_bytes
    if device.type != "cpu" and budget is not None and budget < min(copied, least):
        raise MemoryBudgetError(
            f"The buffers through which host memory and the device exchange tiles take {least:,} bytes of pinned "
            f"memory, {least - budget:,} more than Options(pinned_bytes={budget:,}). Raise it, choose a smaller "
            "tile_bytes, or keep nothing on the cpu tier."
        )


def _one_of(what: str, value: object, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is none of the choices. `what` is the name of the argument."""
    if value not in choices:
        raise ConfigError(f"{what}={value!r}: use one of {', '.join(map(repr, choices))}.")
