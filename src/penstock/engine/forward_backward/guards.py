"""Methods of torch on a prepared model: they work, or raise an error that names what to call instead."""

import copy
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.forward_backward.casts import AttributePatches
from penstock.engine.forward_backward.forward import HOOK_ID
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.unit.parameter import OWNER, ParameterOwner, UnitParameter
from penstock.engine.unit.unit import Unit
from penstock.errors import EngineError

# ----------------------------------------------------------------------------------------------------------------------
# Methods that users call on any module, on a prepared one.
#
# state_dict        of parameters that are not gathered is refused: it would be NaN.
# load_state_dict   is refused where the next update would undo it, and with `assign=True`, which replaces parameters.
# to, half, cuda    and all that would give parameters other memory are refused: the next gather would undo them.
# deepcopy, pickle  make a plain model without anything of Penstock if the parameters are there (inside `gathered`, or
#                   resident), and are refused otherwise. Torch copies the parameters: `deepcopy` gives each one its own
#                   memory, a pickle keeps that of the whole unit. `copy.copy` shares modules and parameters.
# DDP, DataParallel are refused: they would reduce gradients and replace the memory of parameters beside the engine.
# ----------------------------------------------------------------------------------------------------------------------


def is_owned(parameter: nn.Parameter) -> bool:
    """Return True if the parameter belongs to a prepared model."""
    owner = parameter.__dict__.get(OWNER)
    return owner is not None and owner.is_alive()


class ModelGuards:
    """Hooks and methods on a model's modules that run before torch's own.

    Arguments:
        model: the prepared model.
        units: the units of all its parameters.
        hooks: tell if a forward is under way, and have the gradient proxies.
        patches: patches the methods in, and removes them.
        replaced: other patches on the modules, which are left out of copies.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        hooks: Hooks,
        patches: AttributePatches,
        replaced: AttributePatches,
    ) -> None:
        self._hooks = hooks
        self._places = {p.tensor: (unit, p) for unit in units for p in unit.parameters}
        self._handles: list[RemovableHandle] = []
        self._attached = replaced, patches
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                saves = module.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
                loads = module.register_load_state_dict_pre_hook(self._before_load)  # type: ignore[no-untyped-call]
                self._handles += [saves, loads]
            patches.plant(module, "_apply", partial(self._apply, module))
            refuse = partial(refuse_wrapper, module)
            # `DistributedDataParallel` iterates over this attribute first of all. The first item raises the error.
            patches.plant(module, "_ddp_params_and_buffers_to_ignore", map(refuse, repeat("DistributedDataParallel")))
            patches.plant(module, "_replicate_for_data_parallel", partial(refuse, "DataParallel"))
            # A parameter alone is copied by its class, or refuses it while it is released.
            patches.plant(module, "__reduce_ex__", partial(self._reduce_module, module))
        for parameter, (_, own) in self._places.items():
            patches.plant(parameter, OWNER, ParameterOwner(self.read, own.name))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read(self, parameter: nn.Parameter) -> None:
        """Gather a released parameter that an operation reads, if a forward of the model is under way in this thread.

        Raises:
            EngineError: an update has failed, or this process is the child of a fork.
        """
        unit, _ = self._places[parameter]
        unit.params.written.check()
        self._hooks.read(unit)

    def _reduce_module(self, module: nn.Module, protocol: Any) -> Any:
        """Reduce a module for a copy as its class does, without hooks and patches of Penstock."""
        parts = type(module).__reduce_ex__(module, protocol)
        if sys._getframe(1).f_code is copy.copy.__code__:
            return parts
        if absent := self._absent(module.parameters()):
            raise EngineError(
                f"A prepared model cannot be copied or pickled here (copy.deepcopy, AveragedModel, torch.save(model)): "
                f"{absent}. Copy it before prepare(), or inside optimizer.gathered(), on every rank: such a copy is a "
                "plain model with the exact values. An average of the parameters is penstock.EMA; to keep the model, "
                "use optimizer.save()."
            )
        if not (isinstance(parts, tuple) and len(parts) > 2 and isinstance(parts[2], dict)):
            return parts  # by a class with its own reduction
        function, arguments, state, *rest = parts
        state = dict(state)
        for part in self._attached:
            part.clean(module, state)
        ours = {HOOK_ID, *(handle.id for handle in self._handles)}
        for name, hooks in state.items():
            if "_hooks" in name and isinstance(hooks, OrderedDict):
                state[name] = OrderedDict((key, hook) for key, hook in hooks.items() if key not in ours)
        state["_parameters"] = dict(state.get("_parameters", {}))
        return function, arguments, state, *rest

    def _absent(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """Name the first parameter whose exact values are not there, with the reason; `None` if there is none."""
        for parameter in parameters:
            if parameter not in self._places:
                continue
            unit, own = self._places[parameter]
            if own.is_hidden:
                why = "is not gathered and would read as NaN"
            elif unit.is_rounded:
                why = "shows what its gather carried, which Options(gather_format=) rounds"
            else:
                continue
            return f"parameter '{own.name}' {tuple(parameter.shape)} {why}"
        return None

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix, keep_vars
        if absent := self._absent(module.parameters(recurse=False)):
            raise EngineError(
                f"state_dict(): {absent}. Call it inside optimizer.gathered(), on every rank, or use optimizer.save() "
                "and penstock.export()."
            )

    def _before_load(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
        assign = bool(metadata.get("assign_to_params_buffers", False))
        for own_name, parameter in module._parameters.items():
            if parameter is None or parameter not in self._places or prefix + own_name not in state_dict:
                continue
            unit, own = self._places[parameter]
            if assign:
                raise EngineError(
                    f"load_state_dict(assign=True) would put another parameter in place of '{own.name}', which nothing "
                    "would train. Call it without assign, inside optimizer.gathered(modify=True)."
                )
            is_there = unit.resident and unit.is_whole and not own.is_hidden
            if not (unit.holding.blocks or is_there):
                raise EngineError(
                    f"load_state_dict(): parameter '{own.name}' {tuple(parameter.shape)} is not there as a whole. "
                    "Call it inside optimizer.gathered(modify=True), on every rank; a checkpoint is read by "
                    "optimizer.load()."
                )

    def _apply(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Replace `Module._apply`, which `to`, `half`, `cuda`, `to_empty`, `share_memory` and others go through.

        A function that leaves parameters unchanged is applied to buffers; any other is refused. Inside a forward it is
        allowed: routers convert themselves for the time of their forward.
        """
        if self._hooks.in_forward:
            with_gradient = [p for p in self._parameters_of(module.parameters(recurse=False)) if p.left is not None]
            for own in with_gradient:  # torch would convert the proxies as well
                own.hide_gradient()
            type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
            for own in with_gradient:
                self._hooks.proxies.show(own)
            return module
        own_parameters = self._parameters_of(module.parameters(recurse))
        for dtype, device in {(own.tensor.dtype, own.tensor.device) for own in own_parameters}:
            if not _leaves_alone(fn, dtype, device):
                raise EngineError(
                    f"to(), half(), float(), cuda(), to_empty(), share_memory() or the like on a prepared model: its "
                    f"parameters are {dtype} on {device} until close(), and their memory is the engine's. The compute "
                    "dtype is prepare(precision=)."
                )
        for part in module.modules() if recurse else [module]:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = fn(buffer)
        return module

    def _parameters_of(self, tensors: Iterable[nn.Parameter]) -> list[UnitParameter]:
        return [self._places[tensor][1] for tensor in tensors if tensor in self._places]


def _leaves_alone(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a function of `Module._apply` returns tensors as they are, or as copies on the same device.

    `to("cpu:0")` may make a copy, and changes nothing. `to_empty` makes one without the values: the probe has random
    bytes, so that they are not there by chance.
    """
    probe = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=device).view(dtype)
    address, was_shared = probe.data_ptr(), probe.is_shared()  # type: ignore[no-untyped-call]
    made = fn(probe)
    if made.dtype != dtype or made.device != device:
        return False
    if made.data_ptr() == address:
        return True
    is_shared = made.is_shared()  # type: ignore[no-untyped-call]
    return is_shared == was_shared and torch.equal(made.view(torch.uint8), probe.view(torch.uint8))


def refuse_wrapper(module: nn.Module, wrapper: str) -> NoReturn:
    """Refuse a wrapper that would train a prepared model beside its engine."""
    raise EngineError(
        f"{wrapper} was put around a prepared {type(module).__name__}. The optimizer that prepare() returned averages "
        "its gradients over ranks, and keeps its parameters the same on all of them: use the model as it is."
    )


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer that was passed to `prepare`: its methods raise `EngineError` until `close()`.
#
# Learning-rate schedulers over it work, made before `prepare` or after it: they read and write its param groups, which
# are shared, and look at `step` only to see if it was called.
# ----------------------------------------------------------------------------------------------------------------------


METHODS = (
    *("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"),
    *("register_step_pre_hook", "register_step_post_hook"),  # such hooks would never be called
)


def disable_original_optimizer(optimizer: torch.optim.Optimizer, patches: AttributePatches) -> None:
    """Patch the methods of the optimizer that was passed to `prepare`: they raise an error."""
    for name in METHODS:
        patches.plant(optimizer, name, _refusing(type(optimizer).__name__, name))


def _refusing(kind: str, method: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            f"{method}() of the {kind} that was given to prepare(): it trains nothing until close(). Call it on the "
            "optimizer that prepare() returned."
        )

    # A scheduler wraps `step` to count its calls, unless this attribute says that it was wrapped.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return refuse
