"""What a model had before its first values came, to put it back where they do not come."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.engine.units.dtensors import emptied, give_values, is_divided, own_elements
from penstock.errors import ConfigError


def keep_values(model: nn.Module) -> Callable[[], None]:
    """Keep the values of a model's parameters, and its buffers. Return what puts them back.

    Their memory is there until that is dropped: values that come from elsewhere may not fit, or not come. Parameters on
    the meta device have none.
    """
    values = {p: own_elements(p).detach() for p in model.parameters() if not p.is_meta}
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]

    def undo() -> None:
        for parameter, value in values.items():
            give_values(parameter, value)
        for module, own in buffers:
            module._buffers.update(own)

    return undo


def replace_meta(model: nn.Module) -> Callable[[], None]:
    """Make empty parameters on the cpu of those on the meta device, the same objects: optimizers keep them.

    Returns:
        What makes them as they were.

    Raises:
        ConfigError: one is held by what would not see that; nothing has changed.
    """
    values: dict[nn.Parameter, Tensor] = {}

    def undo() -> None:
        release_references(model)
        for parameter, value in values.items():
            _exchange(parameter, value)
        renew_references(model)

    release_references(model)  # before the first exchange, which they would stop
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                value = parameter.detach()
                try:
                    _exchange(parameter, _empty(parameter))
                except RuntimeError as error:
                    raise ConfigError(
                        f"Parameter '{name}' is on the meta device and cannot be given values: something else holds a "
                        f"weak reference to it, or a graph. Prepare the model before that is made. ({error})"
                    ) from error
                values[parameter] = value
    except ConfigError:
        undo()
        raise
    renew_references(model)
    return undo


def release_references(model: nn.Module) -> None:
    """Drop the weak references by which torch's recurrent modules note their parameters: exchanges refuse those."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []


def renew_references(model: nn.Module) -> None:
    """Have torch's recurrent modules note their parameters again, after `release_references`."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = module._flat_weights
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


def _empty(parameter: nn.Parameter) -> Tensor:
    return emptied(parameter) if is_divided(parameter) else torch.empty(0, dtype=parameter.dtype)


def _exchange(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value on another device."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # else what people set on it would go with the exchange
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
