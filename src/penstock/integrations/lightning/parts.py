"""Which optimizer trains which part of a module: the whole for one, submodules that are apart for several."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.integrations.engine_internals import persistent_buffers


@dataclass(frozen=True)
class Part:
    """A module, or a submodule, that one optimizer trains, or none.

    Attributes:
        name: the submodule's name; empty for the whole.
        module: the submodule.
        optimizer: the user's; `None` where nothing trains it.
    """

    name: str
    module: nn.Module
    optimizer: Any


def divide(module: nn.Module, optimizers: Sequence[Any]) -> list[Part]:
    """Find what each optimizer trains.

    Arguments:
        module: the user's.
        optimizers: over its parameters, each in one of them at most.

    Returns:
        A part for each optimizer, in their order. With several, that is the largest submodule in which no other has a
        parameter; and parts without optimizer for the submodules that nothing trains.

    Raises:
        ConfigError: an optimizer has no parameter of the module, or they share a submodule.
    """
    if len(optimizers) <= 1:
        return [Part("", module, optimizer) for optimizer in optimizers or [None]]
    numbers = {
        p: n for n, optimizer in enumerate(optimizers) for group in optimizer.param_groups for p in group["params"]
    }
    trained_by = {
        name: {numbers[p] for p in inner.parameters() if p in numbers} for name, inner in module.named_modules()
    }
    parts = []
    for number, optimizer in enumerate(optimizers):
        own = [name for name, found in trained_by.items() if found == {number}]
        outermost = [name for name in own if not any(name.startswith(f"{other}.") for other in own)]
        if len(outermost) != 1 or not _has_all(module.get_submodule(outermost[0]), optimizer):
            where = f"in {', '.join(map(repr, outermost))}" if outermost else "in no submodule of its own"
            raise ConfigError(
                f"Optimizer {number} of {len(optimizers)} ({type(optimizer).__name__}) has its parameters {where}. "
                "Several optimizers train one submodule each, with all its parameters that are trained: put those of "
                "one optimizer into one submodule, or use one optimizer with param groups."
            )
        parts.append(Part(outermost[0], module.get_submodule(outermost[0]), optimizer))
    return [*parts, *_untrained("", module, {part.name for part in parts})]


def _untrained(name: str, module: nn.Module, trained: Set[str]) -> Iterator[Part]:
    """Find the largest submodules with parameters that are in no trained part, and have none inside."""
    if name in trained or next(module.parameters(), None) is None:
        return
    if any(other.startswith(f"{name}." if name else "") for other in trained):
        for own, child in module.named_children():
            yield from _untrained(f"{name}.{own}" if name else own, child, trained)
    else:
        yield Part(name, module, None)


def _has_all(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a module has all parameters of an optimizer."""
    inside = set(module.parameters())
    return all(p in inside for group in optimizer.param_groups for p in group["params"])


class Rest:
    """What modules around parts have of their own: it lies on the device, in the compute dtype, until `restore`.

    Arguments:
        module: the user's.
        parts: those that are prepared.
        device: where they compute.
        dtype: the compute dtype.
    """

    def __init__(self, module: nn.Module, parts: Sequence[Part], device: torch.device, dtype: torch.dtype) -> None:
        prepared = {inner for part in parts for inner in part.module.modules()}
        self._before: list[tuple[Tensor, Tensor]] = []
        for inner in module.modules():
            if inner not in prepared:
                for parameter in inner.parameters(recurse=False):
                    self._before.append((parameter, parameter.data))
                    parameter.data = parameter.data.to(device, dtype if parameter.is_floating_point() else None)
                for name, buffer in inner.named_buffers(recurse=False):
                    inner._buffers[name] = buffer.to(device)

    def restore(self) -> None:
        """Give parameters the values and the dtype that they had."""
        for parameter, data in self._before:
            parameter.data = data
        self._before.clear()


# Whole weights


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """List the tensors of a module's `state_dict`, which cannot be asked for, by name; tied ones under each."""
    return dict(module.named_parameters(remove_duplicate=False)) | persistent_buffers(module)


def gather_state(module: nn.Module, owners: Sequence[tuple[nn.Module, Any]], *, keep: bool) -> dict[str, Tensor]:
    """Gather the weights of a module one after the other, at master precision. Collective.

    Arguments:
        module: the user's.
        owners: modules that were prepared, with what `prepare` returned for each.
        keep: whether this rank keeps them, in host memory; else the result is empty.

    Returns:
        What its `state_dict` would be: trained floating-point parameters in fp32, on the cpu.
    """
    owner = {parameter: handle for inner, handle in owners for parameter in inner.parameters()}
    whole: dict[Tensor, Tensor] = {}
    named = names_of(module)
    for tensor in dict.fromkeys(named.values()):
        handle = owner.get(tensor)  # type: ignore[call-overload] # buffers have none
        if handle is None:
            value = tensor.detach().to("cpu", copy=True) if keep else None
        elif tensor.is_floating_point():
            value = handle.full_param(tensor)
        else:  # codes of a quantised weight are no numbers
            with handle.gathered([tensor]):
                value = tensor.detach().to("cpu", copy=True) if keep else None
        if keep and value is not None:
            whole[tensor] = value
    return {name: whole[tensor] for name, tensor in named.items()} if keep else {}


def put_state(
    module: nn.Module, owners: Sequence[tuple[nn.Module, Any]], state: dict[str, Tensor], *, strict: bool
) -> None:
    """Overwrite the weights of a module with whole ones, the same on every rank. Collective.

    Arguments:
        module: the user's.
        owners: modules that were prepared, with what `prepare` returned for each.
        state: tensors by their names in the module's `state_dict`.
        strict: whether names may not be missing, and no others be there.

    Raises:
        ConfigError: names are missing or unexpected, or a shape is another. Nothing has changed.
    """
    named = names_of(module)
    missing, unexpected = sorted(named.keys() - state.keys()), sorted(state.keys() - named.keys())
    wrong = [name for name in named.keys() & state.keys() if named[name].shape != state[name].shape]
    if wrong or (strict and (missing or unexpected)):
        raise ConfigError(
            f"These weights are not of {type(module).__name__}: missing {missing[:8]}, unexpected {unexpected[:8]}, "
            f"of another shape {sorted(wrong)[:8]}. Load those of this model, or set strict_loading=False."
        )
    owner = {parameter: handle for inner, handle in owners for parameter in inner.parameters()}
    for tensor, name in {tensor: name for name, tensor in named.items() if name in state}.items():
        handle = owner.get(tensor)  # type: ignore[call-overload] # buffers have none
        if handle is not None and tensor.is_floating_point():
            handle.set_full_param(tensor, state[name].float())
        elif handle is not None:
            with handle.gathered([tensor], modify=True), torch.no_grad():
                tensor.copy_(state[name])
        else:
            with torch.no_grad():
                tensor.copy_(state[name])
