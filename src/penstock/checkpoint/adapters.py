"""LoRA adapters as peft lays them out in a model, and how they are merged into what they adapt.

base_model.model.layers.0.q_proj.base_layer.weight         W (out, in)   becomes  layers.0.q_proj.weight
base_model.model.layers.0.q_proj.base_layer.weight_scale   s (out,)      where W is int8 codes
base_model.model.layers.0.q_proj.lora_A.default.weight     A (r, in)
base_model.model.layers.0.q_proj.lora_B.default.weight     B (out, r)

merged = s W + alpha / r B A, in fp32
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, one_line

PEFT_PREFIX = "base_model.model."
COMPILED = "_orig_mod"  # torch.compile's
OF_BASE = ("base_layer", "original_module")  # peft's, around what it adapts

#: Settings of peft's with which a layer computes something else than the above.
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
    """Leave components out of a dotted name."""
    left_out = set(components)
    return ".".join(component for component in name.split(".") if component not in left_out)


def base_name(name: str) -> str:
    """Say what a tensor of the base is called where it has no adapters, by its name in the adapted model."""
    return without(without(name, (COMPILED,)).removeprefix(PEFT_PREFIX), OF_BASE)


@dataclass(frozen=True)
class Merge:
    """What a weight is made of, by the names in the adapted model.

    Attributes:
        shape: that of the weight: (out, in), or (in, out) where it is transposed.
        scale: the scales of its rows, where it is codes.
        adapter: A and B, where it has an adapter.
        factor: what their product counts.
        transposed: whether the weight lies the other way round than B A.
    """

    shape: tuple[int, ...]
    scale: str | None = None
    adapter: tuple[str, str] | None = None
    factor: float = 1.0
    transposed: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """What must be whole in memory to merge a part."""
        return (*(self.adapter or ()), *(() if self.scale is None else (self.scale,)))


@dataclass(frozen=True)
class Form:
    """The shape and dtype of a tensor of the adapted model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def plan_merges(forms: Mapping[str, Form], settings: Mapping[str, Any], adapter: str) -> dict[str, Merge]:
    """Find every weight of a base that is not written as it is: those with an adapter, and those of codes.

    Arguments:
        forms: every parameter of the adapted model.
        settings: peft's, as `adapter_config.json` has them.
        adapter: the adapter's name.

    Raises:
        ConfigError: the adapters are of another kind, or do not fit what they adapt.
    """
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"adapters of type {one_line(str(settings.get('peft_type')), 40)} are not merged, LoRA alone")
    odd = [name for name in _OTHER_THAN_LORA if settings.get(name)]
    if odd:
        raise ConfigError(f"adapters with {odd[0]} are not merged")
    merges = {name: Merge(form.shape, scale=f"{name}_scale") for name, form in forms.items() if _is_codes(name, forms)}
    used: set[str] = set()
    down_suffix, up_suffix = f".lora_A.{adapter}.weight", f".lora_B.{adapter}.weight"
    for down in [name for name in forms if name.endswith(down_suffix)]:
        layer = down.removesuffix(down_suffix)
        base, up = f"{layer}.base_layer.weight", f"{layer}{up_suffix}"
        if base not in forms or up not in forms:
            raise ConfigError(f"'{one_line(layer, 200)}' lacks its {'base' if base not in forms else 'lora_B'}")
        used |= {down, up}
        of_codes = merges.get(base, Merge(forms[base].shape))
        merges[base] = _adapted(of_codes, layer, (down, up), forms, settings)
    other = [name for name in forms if name not in used and any(part.startswith("lora_") for part in name.split("."))]
    if other:
        raise ConfigError(f"'{one_line(other[0], 200)}' is of no linear layer of the adapter '{one_line(adapter, 40)}'")
    return merges


def _is_codes(name: str, forms: Mapping[str, Form]) -> bool:
    scale, form = forms.get(f"{name}_scale"), forms[name]
    return form.dtype == torch.int8 and len(form.shape) == 2 and scale is not None and scale.shape == form.shape[:1]


def _adapted(
    base: Merge, layer: str, adapter: tuple[str, str], forms: Mapping[str, Form], settings: Mapping[str, Any]
) -> Merge:
    """Add an adapter to what a weight is made of."""
    down, up = (forms[name].shape for name in adapter)
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
        merge: what the weight is made of.
        held: what that needs, whole, on the cpu.
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
