"""Values of parameters, gradients and states as people give them."""

import math
from typing import Any

import torch
from torch import Tensor

from penstock.engine.units.dtensors import cut, is_divided, own_part
from penstock.errors import ConfigError
from penstock.layout import Region, Slot


def as_state(value: Any) -> Tensor:
    """Make a value of a `state_dict`, which may be a number, a tensor."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")


def greater(one: float, other: float) -> float:
    """Choose the greater of two numbers; NaN where one of them is, which `max` would drop."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def check_value(name: str, slot: Slot, value: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuse what cannot be written, before anything is. `shape` is a state's, where it has another than its slot."""
    if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        raise ConfigError(f"The value for '{name}' is sparse, quantised, complex or meta. Give a dense, real tensor.")
    if shape not in (None, slot.shape):
        if tuple(value.shape) != shape:
            raise ConfigError(f"The value for '{name}' has shape {tuple(value.shape)}; this state of it has {shape}.")
        return
    whole = slot.shape if slot.region is None else slot.region.shape
    if tuple(value.shape) != whole:
        raise ConfigError(f"The value for '{name}' has shape {tuple(value.shape)}; the parameter has {whole}.")


def flat_part(value: Tensor, like: Tensor, slot: Slot) -> Tensor:
    """Cut a value for a parameter to what its slot holds, flat. Collective where a DTensor is divided otherwise."""
    value = value.detach()
    if is_divided(value):
        value = own_part(value, like)
    elif slot.region is not None:
        value = cut(value, slot.shape, slot.region)
    return value.reshape(-1)


def among_zeros(own: Tensor, region: Region) -> Tensor:
    """Put this rank's elements into a whole tensor, whose others are zeros."""
    whole = torch.zeros(region.shape, dtype=own.dtype, device="cpu")
    cut(whole, own.shape, region).copy_(own)
    return whole
