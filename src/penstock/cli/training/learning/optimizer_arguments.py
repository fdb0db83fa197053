"""`--optimizer-name` and `--optimizer-args`: a class of torch's, and what its constructor is given."""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.muon import muon
from penstock.errors import ConfigError, one_line
from penstock.optim import Lion

#: By the names of `settings.learning.OPTIMIZERS`.
CLASSES: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "muon": muon,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}
ADAMW_BETAS = (0.9, 0.95)
DECOUPLED_DECAY = 0.1
#: Whose weight decay is beside the gradient, and not in it.
_DECOUPLED = ("adamw", "lion", "muon")
_WITH_ADAMW_BETAS = ("adamw", "muon")
#: Arguments that options of their own say.
_OWN_OPTIONS = {"lr": "--lr", "betas": "--betas", "weight_decay": "--weight-decay"}
#: What is no number of the update, but how torch would run it: the library runs it its own way.
_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """List what the optimizer's constructor is given beside parameters, learning rate and weight decay.

    Raises:
        ConfigError: the class has no such argument, it is of another kind, or the constructor refuses it.
    """
    name = config.optimizer_name
    kind = CLASSES[name]
    parameters = inspect.signature(kind).parameters
    given: dict[str, Any] = {}
    for text in config.optimizer_args:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not value:
            raise ConfigError(f"--optimizer-args {one_line(repr(text), 40)}: write name=value, such as eps=1e-6.")
        if key in given:
            raise ConfigError(f"--optimizer-args names {key} twice. Give it one value.")
        if key in _OWN_OPTIONS and key in parameters:
            raise ConfigError(f"--optimizer-args {key}=: use {_OWN_OPTIONS[key]}, which says the same.")
        if key not in _known(parameters):
            raise ConfigError(_unknown(name, key, _known(parameters)))
        given[key] = _value(name, parameters[key], value)
    if "betas" in parameters:
        if config.betas is not None or name in _WITH_ADAMW_BETAS:
            given["betas"] = config.betas or ADAMW_BETAS
    elif config.betas is not None:
        raise ConfigError(f"--betas: {name} has none. Leave the option out.")
    _try(name, kind, given)
    return given


def takes_weight_decay(name: str) -> bool:
    """Tell whether an optimizer has weight decay."""
    return "weight_decay" in inspect.signature(CLASSES[name]).parameters


def weight_decay_of(config: TrainConfig) -> float:
    """Say how much matrices decay: as asked for, or as is usual for an optimizer.

    In others than these it would be a part of the gradient (L2), which is another thing, and as much of it too much.
    """
    if config.weight_decay is not None:
        return config.weight_decay
    return DECOUPLED_DECAY if config.optimizer_name in _DECOUPLED else 0.0


def _known(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """List the arguments that `--optimizer-args` may name."""
    return [name for name in parameters if name not in _HOW and name not in _OWN_OPTIONS]


def _unknown(name: str, key: str, known: list[str]) -> str:
    """Say that there is no such argument, and which there are."""
    near = difflib.get_close_matches(key, known, 1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"--optimizer-args: {name} has no {one_line(repr(key), 40)}.{meant} It has {', '.join(known)}."


def _value(name: str, parameter: inspect.Parameter, text: str) -> Any:
    """Read a value of the kind that the constructor takes."""
    kind = str(parameter.annotation)
    said = f"--optimizer-args {parameter.name}={one_line(text, 40)}: {name} takes"
    if "bool" in kind:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ConfigError(f"{said} true or false.")
        return text.lower() in _TRUE
    if "tuple" in kind:
        parts = [_number(part) for part in text.split(",")]
        if len(parts) != len(parameter.default) or None in parts:
            raise ConfigError(f"{said} {len(parameter.default)} numbers, such as 0.5,1.2.")
        return tuple(parts)
    number = _number(text)
    if number is None or (parameter.annotation is int and number % 1):
        raise ConfigError(f"{said} a {'whole ' if parameter.annotation is int else ''}number.")
    return int(number) if parameter.annotation is int else number


def _number(text: str) -> float | None:
    """Read a finite number; `None` where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _try(name: str, maker: Callable[..., torch.optim.Optimizer], given: Mapping[str, Any]) -> None:
    """Make one of a single element: its constructor checks the values, and what goes with what."""
    one = nn.Parameter(torch.zeros(1, 1))
    try:
        maker([{"params": [one], "rule": "muon"}] if maker is muon else [one], lr=1e-3, **given)
    except Exception as error:
        raise ConfigError(f"--optimizer-args: {name} does not take them: {one_line(error)}. Mend them.") from error
