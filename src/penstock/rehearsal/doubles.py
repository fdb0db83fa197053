"""A model and its optimizer once more, without values: the rehearsal has them to itself.

Structure, hooks and attributes are copied; parameters have memory that nobody touches. What is not copied stays shared.
"""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.rehearsal.hollow import hollow
from penstock.rehearsal.rehearsed import SMALL_BYTES


def double(model: nn.Module) -> nn.Module:
    """Copy a model, on any device, as one on the cpu whose parameters have no values. Small buffers keep theirs.

    Raises:
        ConfigError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        other = nn.Parameter(hollow(parameter.shape, parameter.dtype), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = other
    for buffer in model.buffers():
        if buffer.layout is torch.strided:
            memo[id(buffer)] = _buffer(buffer)
    try:
        other_model = copy.deepcopy(model, memo)
    except Exception as error:  # it is somebody else's code
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, which a rehearsal needs: {one_line(error)}. Give a function "
            "that makes it on the meta device instead."
        ) from error
    return other_model


def double_optimizer(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer], model: nn.Module, other: nn.Module
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and options over the parameters of a copy.

    Arguments:
        optimizer: the one that is meant, or its class, which takes all parameters.
        model: the model that was copied.
        other: its copy.
    """
    if isinstance(optimizer, type):
        return optimizer(other.parameters())  # type: ignore[call-arg]
    twins = dict(zip(model.parameters(), other.parameters(), strict=True))
    made = copy.copy(optimizer)
    made.param_groups = [
        {**group, "params": [twins[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    return made


def _buffer(buffer: Tensor) -> Tensor:
    if buffer.nbytes > SMALL_BYTES:
        return hollow(buffer.shape, buffer.dtype)
    if buffer.is_meta:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return buffer.detach().to("cpu", copy=True)
