"""Folders of pretrained models: their files and their adapters."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.format import SavedParameter, dtype_name
from penstock.checkpoint.reader import Checkpoint
from penstock.errors import ConfigError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# Weights in 8 bits: a code for each, and a scale for each row. code * scale is rounded once.
# ----------------------------------------------------------------------------------------------------------------------


MOST_CODE = 127
SCALE_DTYPE = torch.bfloat16


def scales_of(weight: Tensor) -> Tensor:
    """Return the scale of each row of a weight (rows, in). The largest magnitude of a row has the largest code.

    Raises:
        ConfigError: a value is not finite.
    """
    most = weight.abs().amax(1).float()
    if not bool(most.isfinite().all()):  # amax of NaN is NaN
        raise ConfigError("holds a value that is not finite, which no code stands for")
    scale = (most / MOST_CODE).to(SCALE_DTYPE)
    return torch.where(scale > 0, scale, 1)  # a row of zeros


def codes_of(weight: Tensor, scale: Tensor) -> Tensor:
    """Round each value of a weight (rows, in) to its nearest code, int8."""
    # The scale is rounded, so the largest value may be slightly beyond the largest code.
    return (weight.float() / scale.float()[:, None]).round_().clamp_(-MOST_CODE, MOST_CODE).to(torch.int8)


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (rows, in) of codes and scales, rounded once."""
    wide = torch.promote_types(dtype, scale.dtype)
    return codes.to(wide).mul_(scale.to(wide)[:, None]).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# LoRA adapters as peft names them in a model, and their merge into the weights that they adapt.
#
# base_model.model.layers.0.q_proj.base_layer.weight         W (out, in)   becomes  layers.0.q_proj.weight
# base_model.model.layers.0.q_proj.base_layer.weight_scale   s (out,)      where W is int8 codes
# base_model.model.layers.0.q_proj.lora_A.default.weight     A (r, in)
# base_model.model.layers.0.q_proj.lora_B.default.weight     B (out, r)
#
# merged = s W + alpha / r B A, in fp32
# ----------------------------------------------------------------------------------------------------------------------


PEFT_PREFIX = "base_model.model."
COMPILED = "_orig_mod"  # torch.compile's
OF_BASE = ("base_layer", "original_module")  # peft's, around what it adapts

#: Settings of peft with which a layer does not compute the above.
_OTHER_THAN_LORA = (
    "use_dora",
    "lora_bias",
    "alpha_pattern",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
)


def without(name: str, components: Iterable[str]) -> str:
    """Return a dotted name without some components."""
    left_out = set(components)
    return ".".join(component for component in name.split(".") if component not in left_out)


def base_name(name: str) -> str:
    """Return the name of a tensor in the base without adapters, by its name in the adapted model."""
    return without(without(name, (COMPILED,)).removeprefix(PEFT_PREFIX), OF_BASE)


@dataclass(frozen=True)
class Merge:
    """The tensors that a merged weight is made of, by their names in the adapted model.

    Attributes:
        shape: the weight's: (out, in), or (in, out) if it is transposed.
        scale: the scales of its rows, if it consists of codes.
        adapter: A and B, if it has an adapter.
        factor: the factor of their product.
        transposed: True if the weight is the transpose of B A.
    """

    shape: tuple[int, ...]
    scale: str | None = None
    adapter: tuple[str, str] | None = None
    factor: float = 1.0
    transposed: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The tensors that must be whole in memory to merge a part."""
        return (*(self.adapter or ()), *(() if self.scale is None else (self.scale,)))


#: Objects with the shape and dtype of each tensor of the adapted model, by name.
Forms = Mapping[str, SavedParameter] | Mapping[str, Tensor]


def plan_merges(forms: Forms, settings: Mapping[str, Any], adapter: str) -> dict[str, Merge]:
    """Plan the weights of a base that are not written as they are: those with an adapter, and those of codes.

    Arguments:
        forms: every parameter of the adapted model.
        settings: peft's, as `adapter_config.json` has them.
        adapter: the adapter's name.

    Raises:
        ConfigError: the adapters are of another kind, or do not fit the weights.
    """
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"adapters of type {one_line(str(settings.get('peft_type')), 40)} are not merged, LoRA alone")
    odd = [name for name in _OTHER_THAN_LORA if settings.get(name)]
    if odd:
        raise ConfigError(f"adapters with {odd[0]} are not merged")
    merges = {
        name: Merge(tuple(form.shape), scale=f"{name}_scale") for name, form in forms.items() if _is_codes(name, forms)
    }
    used: set[str] = set()
    down_suffix, up_suffix = f".lora_A.{adapter}.weight", f".lora_B.{adapter}.weight"
    for down in [name for name in forms if name.endswith(down_suffix)]:
        layer = down.removesuffix(down_suffix)
        base, up = f"{layer}.base_layer.weight", f"{layer}{up_suffix}"
        if base not in forms or up not in forms:
            raise ConfigError(f"'{one_line(layer, 200)}' lacks its {'base' if base not in forms else 'lora_B'}")
        used |= {down, up}
        of_codes = merges.get(base, Merge(tuple(forms[base].shape)))
        merges[base] = _adapted(of_codes, layer, (down, up), forms, settings)
    other = [name for name in forms if name not in used and any(part.startswith("lora_") for part in name.split("."))]
    if other:
        raise ConfigError(f"'{one_line(other[0], 200)}' is of no linear layer of the adapter '{one_line(adapter, 40)}'")
    return merges


def _is_codes(name: str, forms: Forms) -> bool:
    scale, form = forms.get(f"{name}_scale"), forms[name]
    return form.dtype == torch.int8 and len(form.shape) == 2 and scale is not None and scale.shape == form.shape[:1]


def _adapted(base: Merge, layer: str, adapter: tuple[str, str], forms: Forms, settings: Mapping[str, Any]) -> Merge:
    """Return a merge with an adapter added."""
    down, up = (tuple(forms[name].shape) for name in adapter)
    fits = len(down) == len(up) == 2 and down[0] == up[1] > 0
    straight, turned = ((up[0], down[1]), (down[1], up[0])) if fits else ((), ())
    if not fits or base.shape not in (straight, turned):
        raise ConfigError(f"'{one_line(layer, 200)}' has an adapter of {down} and {up} on a weight of {base.shape}")
    alpha = settings.get("lora_alpha")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) <= torch.finfo(torch.float32).max
    ):
        raise ConfigError(f"lora_alpha is {one_line(repr(alpha), 40)}, no number")
    rank = down[0]
    factor = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
    turns = base.shape != straight or (straight == turned and bool(settings.get("fan_in_fan_out")))
    return Merge(base.shape, base.scale, adapter, factor, turns)


def merged(values: Tensor, start: int, merge: Merge, held: Mapping[str, Tensor]) -> Tensor:
    """Merge a part of a weight, in fp32.

    Arguments:
        values: elements of the weight from `start` on, counted as if it were flat; or its codes.
        start: the first of them.
        merge: the tensors that the weight is made of.
        held: the tensors that the merge needs, whole, on the cpu.
    """
    width = merge.shape[1]
    first, last = start // width, -(-(start + values.numel()) // width)
    inside = slice(start - first * width, start - first * width + values.numel())
    made = values.to(torch.float32, copy=True)
    if merge.scale is not None:
        rows = held[merge.scale][first:last].float()
        made *= rows[:, None].expand(-1, width).reshape(-1)[inside]
    if merge.adapter is not None:
        down, up = (held[name].float() for name in merge.adapter)
        product = down.T[first:last] @ up.T if merge.transposed else up[first:last] @ down
        made += product.mul_(merge.factor).reshape(-1)[inside]
    return made


# ----------------------------------------------------------------------------------------------------------------------
# Names of tensors in the files of transformers and peft, and the configuration beside them.
#
# A model that transformers loads has `model*.safetensors`, `config.json` and `generation_config.json`. Adapters that
# peft loads have `adapter_model.safetensors` and `adapter_config.json`; in the model, the name of each of its
# parameters has the adapter's name in it:
#
#     base_model.model.lm_head.base_layer.weight         base      lm_head.weight
#     base_model.model.lm_head.lora_A.default.weight     adapter   base_model.model.lm_head.lora_A.weight
# ----------------------------------------------------------------------------------------------------------------------


CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter"
CLASS = "class"

_OF_ADAPTER = "modules_to_save"


# In a checkpoint


def describe(model: nn.Module) -> dict[str, str]:
    """Read the class of a model and its configuration files, if it has some, for `export`.

    Of a model with adapters (peft), also the configuration and the name of the adapters.
    """
    model = getattr(model, "_orig_mod", model)  # unwrapped from torch.compile
    files: dict[str, str] = {}
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        name = "default" if "default" in adapters else next(iter(adapters))
        files |= {ADAPTER: name, ADAPTER_CONFIG: _adapter_config(adapters[name])}
        model = getattr(model, "get_base_model", lambda: model)()
    files[CLASS] = type(model).__name__
    for attribute, name in (("config", CONFIG), ("generation_config", GENERATION_CONFIG)):
        text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(text):
            files[name] = str(text())
    return files


def _adapter_config(config: Any) -> str:
    """Write adapters' configuration as peft saves it, with sets as lists."""
    return json.dumps(
        config.to_dict(),
        indent=2,
        sort_keys=True,
        default=lambda value: sorted(value) if isinstance(value, set) else str(value),
    )


# In an export


@dataclass(frozen=True)
class FileSet:
    """Files of an export that are read together: those of a model, or those of its adapters.

    Attributes:
        folder: the folder inside the export; empty for the export itself.
        stem: the beginning of the names of tensor files.
        one_file: True if all tensors must be in one file.
        names: the names of the tensors, by name in the checkpoint.
        beside: further files: text by name.
        merges: the tensors that are made of several ones, by name in the checkpoint.
    """

    folder: str
    stem: str
    one_file: bool
    names: Mapping[str, str]
    beside: Mapping[str, str]
    merges: Mapping[str, Merge] = field(default_factory=dict)


def file_sets(
    checkpoint: Checkpoint, dtype: torch.dtype, *, adapters_only: bool, merge_adapters: bool = False
) -> list[FileSet]:
    """Plan the files of an export of a checkpoint.

    Arguments:
        checkpoint: the checkpoint.
        dtype: the dtype of the weights, which the configuration names.
        adapters_only: of a model with adapters, write only those.
        merge_adapters: write the model with its adapters merged into it. `adapters_only` has no effect then.

    Raises:
        CheckpointError: names collide, adapters are of an unknown kind, or there are none to merge.
    """
    model = checkpoint.manifest.model
    names = [*checkpoint.manifest.parameters, *checkpoint.manifest.buffers]
    plain = {name: without(name, (COMPILED,)) for name in names}
    if ADAPTER_CONFIG not in model and merge_adapters:
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", "is missing: there are no adapters. Export without merging.")
    if ADAPTER_CONFIG not in model:
        return [FileSet("", "model", False, _distinct(checkpoint, plain), _configuration(checkpoint, dtype))]

    kind = _parse(checkpoint, ADAPTER_CONFIG).get("peft_type")
    if kind != "LORA":
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", f"is of adapters of type {kind}. LoRA alone is exported.")
    adapter = model.get(ADAPTER, "default")
    of_adapter = {name: adapter_name(own, adapter) for name, own in plain.items() if adapter in own.split(".")}
    beside = {ADAPTER_CONFIG: model[ADAPTER_CONFIG]}
    merges = _merges(checkpoint, adapter) if merge_adapters else {}
    if adapters_only and not merge_adapters:
        _check_nothing_else_was_trained(checkpoint, of_adapter)
        return [FileSet("", "adapter_model", True, _distinct(checkpoint, of_adapter), beside)]
    left_out = {*of_adapter, *(merge.scale for merge in merges.values())}
    base = {name: base_name(name) for name in plain if name not in left_out}
    return [
        FileSet("", "model", False, _distinct(checkpoint, base), _configuration(checkpoint, dtype), merges),
        FileSet(ADAPTER, "adapter_model", True, _distinct(checkpoint, of_adapter), beside),
    ]


def adapter_name(name: str, adapter: str) -> str:
    """Return the name of an adapter's parameter in peft's files, by its name in the adapted model."""
    return PEFT_PREFIX + without(name, (COMPILED, adapter, _OF_ADAPTER)).removeprefix(PEFT_PREFIX)


def _merges(checkpoint: Checkpoint, adapter: str) -> dict[str, Merge]:
    """Plan the weights that are merged with adapters, or made of codes."""
    try:
        return plan_merges(checkpoint.manifest.parameters, _parse(checkpoint, ADAPTER_CONFIG), adapter)
    except ConfigError as error:
        raise checkpoint.fail(f"model.{ADAPTER_CONFIG}", f"cannot be merged: {error}.") from error


def _distinct(checkpoint: Checkpoint, names: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse two equal names in an export. Return the names."""
    owners: dict[str, str] = {}
    for own, name in names.items():
        if name in owners:
            raise checkpoint.fail(
                "parameters", f"has '{owners[name]}' and '{own}', which are both '{name}' in an export."
            )
        owners[name] = own
    return names


def _check_nothing_else_was_trained(checkpoint: Checkpoint, exported: Mapping[str, str]) -> None:
    """Refuse a checkpoint with a trained parameter that an export of adapters alone would lose."""
    for name, saved in checkpoint.manifest.parameters.items():
        if saved.trained and name not in exported:
            raise checkpoint.fail(
                f"parameters.{name}",
                "was trained and is of no adapter: peft has no place for it. Export with adapters_only=False.",
            )


def _configuration(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, str]:
    """Write the configuration of the model of a checkpoint."""
    model = checkpoint.manifest.model
    if CONFIG in model:
        _parse(checkpoint, CONFIG)  # refuses a marker with an invalid one
    return configuration(model, dtype)


def configuration(model: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
    """Write `config.json` as `save_pretrained` does, and the other configuration files; text by name.

    Arguments:
        model: the result of `describe`.
        dtype: the dtype of the weights.
    """
    files = {}
    if CONFIG in model:
        config = json.loads(model[CONFIG])
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(dtype)
        config["architectures"] = config.get("architectures") or [model[CLASS]]
        files[CONFIG] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    if GENERATION_CONFIG in model:
        files[GENERATION_CONFIG] = model[GENERATION_CONFIG]
    return files


def _parse(checkpoint: Checkpoint, name: str) -> dict[str, object]:
    """Parse one of the configuration files in the marker."""
    try:
        parsed = json.loads(checkpoint.manifest.model[name])
    except (ValueError, RecursionError) as error:
        raise checkpoint.fail(f"model.{name}", f"is not JSON ({error}).") from error
    if not isinstance(parsed, dict):
        raise checkpoint.fail(f"model.{name}", "is not an object.")
    return parsed
