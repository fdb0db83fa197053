"""What `prepare` refuses of models whose parameters are DTensors, before anything is allocated."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.engine.units.dtensors import is_divided, region_of
from penstock.errors import ConfigError
from penstock.machine.mesh import DIVIDE, describe, lines_along, roles_of


def check_divided(parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh | None) -> None:
    """Refuse DTensors that are not divided over `tp` or `ep` dimensions of the mesh.

    Arguments:
        parameters: those of a model, with their names.
        mesh: the one that `prepare` was given.

    Raises:
        ConfigError: names the parameter, and prints both meshes.
    """
    divided = {name: parameter for name, parameter in parameters if is_divided(parameter)}
    if divided and mesh is None:
        name, parameter = next(iter(divided.items()))
        raise ConfigError(
            f"{_which(name, parameter)} and prepare() was given no mesh: say which ranks have copies and which have "
            "parts, prepare(mesh=init_device_mesh(..., mesh_dim_names=('dp_shard', 'tp')))."
        )
    for name, parameter in divided.items():
        assert mesh is not None
        _check(name, parameter, mesh)


def _check(name: str, parameter: Any, mesh: DeviceMesh) -> None:
    which, given = _which(name, parameter), describe(mesh)
    if parameter.device_mesh.device_type != mesh.device_type:
        raise ConfigError(f"{which} and prepare() was given the {given} of {mesh.device_type}: use one kind of device.")
    if parameter.device_mesh.get_coordinate() is None:
        raise ConfigError(f"{which} in which this rank is not; prepare() was given the {given}.")
    if mesh.get_coordinate() is None:
        return  # ranks are refused for it where they are found
    known = list(zip(roles_of(mesh), lines_along(mesh), strict=True))
    for line, placement in zip(lines_along(parameter.device_mesh), parameter.placements, strict=True):
        if placement.is_partial():
            raise ConfigError(f"{which}: a partial sum is no value. Redistribute it to Replicate() or Shard().")
        if len(line) == 1:
            continue
        role = next((role for role, of_mesh in known if of_mesh == line), None)
        if role is None:
            raise ConfigError(
                f"{which}, and no dimension of the {given} has its ranks {line}. Give prepare() the mesh of all "
                "dimensions, with a tp or ep dimension of these ranks."
            )
        if not placement.is_replicate() and role != DIVIDE:
            raise ConfigError(
                f"{which}: its ranks {line} share the training state in the {given}, which Penstock divides itself. "
                "Give the model before fully_shard()."
            )
        if not placement.is_replicate() and type(placement).__name__ != "Shard":
            raise ConfigError(f"{which}: only Shard() and Replicate() can be trained, not {type(placement).__name__}.")
    try:
        region_of(parameter)
    except ConfigError as error:
        raise ConfigError(f"{which}: {error}") from None


def _which(name: str, parameter: Any) -> str:
    placements = ", ".join(map(repr, parameter.placements))
    of_mesh = describe(parameter.device_mesh)
    return f"Parameter '{name}' {tuple(parameter.shape)} is a DTensor ({placements}) on a {of_mesh}"
