"""A model and its optimizer once more, without values: the simulation has them to itself.

Structure, hooks and attributes are copied; parameters have memory that nobody touches. What is not copied stays shared.
"""

import copy
from collections import defaultdict
from collections.abc import Collection
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, one_line
from penstock.planner.simulation.engine_internals import is_divided, own_elements, spec_of, wrapped
from penstock.planner.simulation.fake_operations import SMALL_BYTES
from penstock.planner.simulation.fake_tensor import fake_tensor


def copy_model(model: nn.Module, without: Collection[str] = ()) -> nn.Module:
    """Copy a model, on any device, as one on the cpu whose parameters have no values. Small buffers keep theirs.

    Of a DTensor there are this rank's elements, on the same mesh.

    Arguments:
        model: the model.
        without: the names of blocks in its lists that are left out; others keep their names.

    Raises:
        ConfigError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = _without_values(parameter, memo, keeps_small=False)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.layout is torch.strided:
            memo[id(buffer)] = _without_values(buffer, memo, keeps_small=True)
    for module in model.modules() if dist.is_initialized() else ():  # ranks are not copied
        memo |= {id(held): held for held in vars(module).values() if isinstance(held, (dist.ProcessGroup, DeviceMesh))}
    memo |= {id(module): None for name, module in model.named_modules() if name in without}
    try:
        other_model = copy.deepcopy(model, memo)
    except Exception as error:  # it is somebody else's code
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, which a simulation needs: {one_line(error)}. Give a function "
            "that makes it on the meta device instead."
        ) from error
    for name in without:
        parent, _, child = name.rpartition(".")
        del other_model.get_submodule(parent)._modules[child]
    for module in other_model.modules():
        around = module.__dict__.get("forward")
        if isinstance(around, FunctionType):
            module.__dict__["forward"] = _rebound(around, memo)
    return other_model


def _without_values(tensor: Tensor, memo: dict[int, Any], *, keeps_small: bool) -> Tensor:
    """Make a fake tensor like another one, or copy one to the cpu that is small."""
    if is_divided(tensor):
        spec = spec_of(tensor)
        memo[id(spec.mesh)] = spec.mesh  # ranks are not copied
        return wrapped(_without_values(own_elements(tensor), memo, keeps_small=keeps_small), spec)
    if not keeps_small or tensor.nbytes > SMALL_BYTES:
        return fake_tensor(tensor.shape, tensor.dtype)
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return tensor.detach().to("cpu", copy=True)


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Put the copy's modules in place of the model's: for a module, its method, or a function that closes over them.

    A function is not copied, and one in place of a module's forward would call the modules that were.
    """
    if isinstance(value, MethodType):
        owner = memo.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if isinstance(value, nn.Module) or id(value) in memo or not isinstance(value, FunctionType):
        return memo.get(id(value), value)
    memo[id(value)] = value  # one that closes over itself
    closure = tuple(_cell(cell, memo) for cell in value.__closure__ or ())
    if any(new is not old for new, old in zip(closure, value.__closure__ or (), strict=True)):
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        memo[id(value)] = made
    return memo[id(value)]


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    """Return a cell of the copy's contents, or the same one if these do not differ."""
    try:
        contents = cell.cell_contents
    except ValueError:  # it has none yet
        return cell
    of_copy = _rebound(contents, memo)
    return cell if of_copy is contents else CellType(of_copy)


def copy_optimizer(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer], model: nn.Module, other: nn.Module
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class and options over the parameters of a copy.

    Arguments:
        optimizer: the one that is meant, or its class, which takes all parameters.
        model: the model that was copied.
        other: its copy, which may be without some blocks.
    """
    if isinstance(optimizer, type):
        return optimizer(other.parameters())  # type: ignore[call-arg]
    named = dict(other.named_parameters())
    twins = {parameter: named[name] for name, parameter in model.named_parameters() if name in named}
    made = copy.copy(optimizer)
    made.param_groups = [
        {**group, "params": [twins[parameter] for parameter in group["params"] if parameter in twins]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    return made
