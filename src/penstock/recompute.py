"""Whether a model computes activations again in backward, and how it is told to: as far as anybody can know.

Transformers' models can be told. Others wrap blocks themselves; what they say in an attribute is believed.
"""

import warnings
from collections.abc import Callable

from torch import nn

from penstock.errors import ConfigError

#: What a module says of itself, of transformers' releases before 5.23 and since, and of people's own.
_SAYS = ("is_activation_checkpointing", "is_gradient_checkpointing", "gradient_checkpointing")
_TURNS_ON = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def recomputes(model: nn.Module) -> bool:
    """Whether a model says that it computes activations again, or has blocks that are wrapped to do so."""
    return any(
        type(module).__module__ == _WRAPPER or any(_says(module, name) for name in _SAYS) for module in model.modules()
    )


def can_be_told(model: nn.Module) -> bool:
    """Whether a model has the method that turns it on, and a block that it turns on."""
    return _turn_on(model) is not None and bool(getattr(model, "supports_gradient_checkpointing", True))


def tell(model: nn.Module) -> None:
    """Have a model compute activations again in backward.

    Raises:
        ConfigError: it cannot be told, or refuses.
    """
    turn_on = _turn_on(model)
    if turn_on is None:
        raise ConfigError(
            f"{type(model).__name__} cannot be told to compute activations again in backward. Wrap its blocks "
            "(torch.utils.checkpoint), and set its attribute gradient_checkpointing = True."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that a release has given up
            turn_on()
    except Exception as error:  # it is somebody else's code
        raise ConfigError(
            f"{type(model).__name__} refuses to compute activations again in backward: {error}"
        ) from error


def _says(module: nn.Module, name: str) -> bool:
    if not hasattr(type(module), name) and name not in module.__dict__:  # not by way of __getattr__, which may compute
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return getattr(module, name) is True
        except Exception:  # a property that cannot tell
            return False


def _turn_on(model: nn.Module) -> Callable[[], None] | None:
    return next((method for name in _TURNS_ON if callable(method := getattr(model, name, None))), None)
