"""Models of which each rank has a part: made for ranks that are not there, and held against the mesh that is meant."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.planner.simulation.engine_internals import Grid, divided_over, grid_of, is_divided
from penstock.planner.simulation.simulated_mesh import WITHIN, simulated_mesh

_MAKE = "plan(lambda mesh: parallelised(mesh['tp']), ..., mesh={'dp_shard': 4, 'tp': 2})"


@contextmanager
def on_mesh(
    model: nn.Module | Callable[..., nn.Module], mesh: Mapping[str, int] | None
) -> Iterator[nn.Module | Callable[[], nn.Module]]:
    """Have a function that makes a model for a mesh do so for one of ranks that are not there.

    Arguments:
        model: any that `plan` takes; others than such functions are given as they are.
        mesh: the number of ranks along each dimension, by its name.

    Raises:
        ConfigError: the mesh is none, or there are ranks already.
    """
    if mesh is None or not _asks_for_mesh(model):
        yield model
        return
    grid_of(mesh, sharded=True)
    if not any(name in mesh for name in WITHIN):
        yield model
        return
    with simulated_mesh(mesh) as within:
        yield partial(model, within)


def check_parts(model: nn.Module, grid: Grid) -> nn.Module:
    """Refuse a model of which ranks have other parts than the mesh says.

    Raises:
        ConfigError: names the parameter.
    """
    divided = [(name, p) for name, p in model.named_parameters() if is_divided(p)]
    if grid.tp > 1 and not divided:
        raise ConfigError(
            f"mesh divides the parameters over {grid.tp} ranks, and no parameter of {type(model).__name__} is a "
            f"DTensor. Give a function that makes the model for a mesh: {_MAKE}."
        )
    for name, parameter in divided:
        for line in divided_over(parameter):
            if grid.tp % len(line):
                raise ConfigError(
                    f"Parameter '{name}' is a DTensor of {len(line)} ranks, and mesh divides parameters over "
                    f"{grid.tp}. Give the model's own number: mesh={{..., 'tp': {len(line)}}}."
                )
    return model


def _asks_for_mesh(model: Any) -> bool:
    """Whether it is a function that cannot be called without one argument."""
    if isinstance(model, nn.Module) or not callable(model):
        return False
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # of what is not written in Python
        return False
    return _takes(signature, 1) and not _takes(signature, 0)


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*(None,) * count)
    except TypeError:
        return False
    return True
