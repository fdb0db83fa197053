"""Whole parameters that stand in for DTensors while a model is initialised.

Every rank initialises all of a parameter, from the same random numbers, and keeps its own part. Drawn by torch's
DTensor itself, values would depend on how many ranks there are, and on which device; these are those of one rank alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.engine.units.dtensors import give_values, is_divided


@contextmanager
def standing_in(model: nn.Module) -> Iterator[Mapping[nn.Parameter, nn.Parameter]]:
    """Put a plain parameter of the whole shape, without memory, where a model has a DTensor; afterwards that again.

    Yields:
        By DTensor what stands in for it.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and is_divided(parameter)
    ]
    for parameters, key, parameter in places:
        if parameter not in stand_ins:
            stand_ins[parameter] = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
            stand_ins[parameter].__dict__.update(parameter.__dict__)  # by what people set there some initialise
        parameters[key] = stand_ins[parameter]
    try:
        yield stand_ins
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter


def let_go(stand_in: nn.Parameter) -> None:
    """Give up the memory of one whose values are in their homes: it reads as NaN, and refuses to be written."""
    give_values(stand_in, _without_memory(stand_in))


def _without_memory(like: Tensor) -> Tensor:
    nothing = float("nan") if like.is_floating_point() else 0
    return torch.full((), nothing, dtype=like.dtype, device="cpu").expand(like.shape)
