"""What ranks compare before `prepare` moves a byte: one with another model or other settings would wait for ever."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.config import Options, Placement
from penstock.engine.units.discover import UnitSpec
from penstock.machine.council import Facts

#: Options that say how a rank does its own part, and change nothing that ranks do together.
_OWN = {
    "device_bytes",
    "host_bytes",
    "pinned_bytes",
    "update_threads",
    "streamed_updates",
    "whole_updates",
    "io_queue_depth",
    "checksums",
    "timeout_s",
}


def facts_of(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    groups: Mapping[nn.Parameter, int],
    *,
    placement: Placement,
    options: Options,
    **settings: object,
) -> Facts:
    """Collect what has to be the same on every rank.

    Arguments:
        model: the model, with its values or without.
        specs: its units.
        groups: the number of the param group of each parameter that is in one.
        placement: the homes of the state; its folders are each rank's own and are not compared.
        options: the options; those that change only what a rank does by itself are not compared.
        settings: all other arguments of `prepare`, by name.

    Returns:
        The settings first, then the parameters and buffers in the model's order, then the units: each by a name that a
        message can show.
    """
    facts: Facts = {name: _plain(value) for name, value in settings.items()}
    for what in ("params", "grads", "optimizer", "activations"):
        facts[f"Placement({what}=)"] = _plain(getattr(placement, what))
    for field in dataclasses.fields(options):
        if field.name not in _OWN:
            facts[f"Options({field.name}=)"] = _plain(getattr(options, field.name))
    facts.update(_tensors(model, groups))
    for spec in specs:
        facts[f"unit '{spec.name}'"] = f"{len(spec.names)} parameters: {', '.join(spec.names)}"
    return facts


def _tensors(model: nn.Module, groups: Mapping[nn.Parameter, int]) -> Iterator[tuple[str, str]]:
    """Describe each parameter and each buffer of a model."""
    for name, parameter in model.named_parameters():
        group = groups.get(parameter)
        trained = f"in param group {group}" if group is not None else "in no param group"
        frozen = "" if parameter.requires_grad else ", frozen"
        yield f"parameter '{name}'", f"{_shape(parameter)}, {trained}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}'", _shape(buffer)


def _shape(tensor: torch.Tensor) -> str:
    """Describe the dtype and the shape of a tensor."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _plain(value: Any) -> Any:
    """Turn a setting into what JSON has. Mappings are sorted: the order in which tiers are named says nothing."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
