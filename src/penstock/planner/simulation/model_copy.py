"""A model and its optimizer once more, without values: the simulation has them to itself.

Structure, hooks and attributes are copied; parameters have memory that nobody touches. What is not copied stays shared.
"""

import copy
from collections import defaultdict
from collections.abc import Collection
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, one_line
from penstock.planner.simulation.engine_internals import is_divided, own_elements, spec_of, wrapped
from penstock.planner.simulation.fake_operations import SMALL_BYTES
from penstock.planner.simulation.fake_tensor import fake_tensor

_EMPTY = object()  # what is in a cell that has nothing yet


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
        memo[id(parameter)] = nn.Parameter(_like(parameter, memo), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.layout is torch.strided:
            memo[id(buffer)] = _buffer(buffer)
    for module in model.modules():  # ranks are not copied
        memo |= {id(held): held for held in vars(module).values() if isinstance(held, (ProcessGroup, DeviceMesh))}
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


def _like(parameter: Tensor, memo: dict[int, Any]) -> Tensor:
    """Make a fake tensor like a parameter."""
    if not is_divided(parameter):
        return fake_tensor(parameter.shape, parameter.dtype)
    spec = spec_of(parameter)
    memo[id(spec.mesh)] = spec.mesh
    return wrapped(fake_tensor(own_elements(parameter).shape, parameter.dtype), spec)


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Make a function once more that somebody has put in place of a module's forward: around the copy's own.

    A function is not copied, and what it closes over would be the modules that were.
    """
    if id(function) in memo:
        known: FunctionType = memo[id(function)]
        return known
    memo[id(function)] = function  # one that closes over itself
    contents = [_contents(cell) for cell in function.__closure__ or ()]
    of_copy = [_of_copy(value, memo) for value in contents]
    if all(old is new for old, new in zip(contents, of_copy, strict=True)):
        return function
    closure = tuple(CellType() if new is _EMPTY else CellType(new) for new in of_copy)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    memo[id(function)] = made
    return made


def _of_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy's module, method or function in place of one of the model that was copied."""
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType):
        return _rebound(value, memo)
    return memo.get(id(value), value) if isinstance(value, nn.Module) else value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


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


def _buffer(buffer: Tensor) -> Tensor:
    if is_divided(buffer):
        return wrapped(_buffer(own_elements(buffer)), spec_of(buffer))
    if buffer.nbytes > SMALL_BYTES:
        return fake_tensor(buffer.shape, buffer.dtype)
    if buffer.is_meta:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
    return buffer.detach().to("cpu", copy=True)
