"""Activation checkpointing of a model: does it recompute activations in backward, and can it be turned on?

Models of transformers have a method for it. Other models wrap blocks themselves; their attribute is believed.
"""

import warnings
from collections.abc import Callable

from torch import nn

from penstock.errors import ConfigError

#: Attributes that say so: of transformers before 5.23 and since, and of other models.
_SAYS = ("is_activation_checkpointing", "is_gradient_checkpointing", "gradient_checkpointing")
_TURNS_ON = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def recomputes(model: nn.Module) -> bool:
    """Return True if a model says that it recomputes activations, or has blocks that are wrapped to do so."""
    return any(
        type(module).__module__ == _WRAPPER or any(_says(module, name) for name in _SAYS) for module in model.modules()
    )


def can_be_told(model: nn.Module) -> bool:
    """Return True if a model has the method that turns checkpointing on, and supports it."""
    return _turn_on(model) is not None and bool(getattr(model, "supports_gradient_checkpointing", True))


def tell(model: nn.Module) -> None:
    """Turn on activation checkpointing of a model.

    Raises:
        ConfigError: the model has no method for it, or the method fails.
    """
    turn_on = _turn_on(model)
    if turn_on is None:
        raise ConfigError(
            f"{type(model).__name__} cannot be told to compute activations again in backward. Wrap its blocks "
            "(torch.utils.checkpoint), and set its attribute gradient_checkpointing = True."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated names
            turn_on()
    except Exception as error:  # code of the model, which may raise anything
        raise ConfigError(
            f"{type(model).__name__} refuses to compute activations again in backward: {error}"
        ) from error


def _says(module: nn.Module, name: str) -> bool:
    if not hasattr(type(module), name) and name not in module.__dict__:  # not through __getattr__, which may compute
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return getattr(module, name) is True
        except Exception:  # a property may raise anything
            return False


def _turn_on(model: nn.Module) -> Callable[[], None] | None:
    return next((method for name in _TURNS_ON if callable(method := getattr(model, name, None))), None)
