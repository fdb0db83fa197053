"""What a block leaves behind when its forward is over: buffers that it changed, and tensors that somebody keeps.

A block that runs slice after slice has no graph in its first run, and runs each slice once more in backward. A value
that leaves it by another way than its return is that of one slice and has no gradient; a buffer that changes does so
for each slice, twice. What is kept is told from what the second slice does: what a block makes once, it has made in the
first.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.engine.passes.anchor import HOOK_ID
from penstock.errors import EngineError

_OWN = frozenset(nn.Module().__dict__)  # what every module has: parameters, buffers, modules and hooks
_REST = "or use unit_micro_batches=1"


class Leftovers:
    """Looks after one block.

    Arguments:
        block: the block, a module.
        name: what messages call it.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block = block
        self._name = name
        self._modules = tuple(block.named_modules())

    # Buffers

    def check_statistics(self) -> None:
        """Refuse modules that take statistics over the batch: those of a slice are others."""
        for where, module in self._modules:
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise EngineError(
                    f"'{where}' of block '{self._name}' is a {type(module).__name__}, which would take the statistics "
                    "of each slice of the batch, twice. Call its eval(), use another norm (GroupNorm, LayerNorm), "
                    f"{_REST}."
                )

    def buffers(self, *, with_values: bool) -> "Buffers":
        """Note the block's buffers as they are; with their values they can be put back."""
        return Buffers(self._modules, with_values=with_values)

    def check_buffers(self, before: "Buffers") -> None:
        """Refuse buffers that have changed; those whose values are known are put back."""
        changed = before.restore()
        if changed:
            raise EngineError(
                f"Block '{self._name}' changes its buffer '{changed[0]}' in forward, and would do so for each slice of "
                f"the batch, and again in backward. Freeze it (eval(), where the module asks for that), {_REST}."
            )

    # Tensors

    def kept(self) -> dict[int, tuple[str, Tensor, int]]:
        """Note the tensors in attributes of the block's modules, by identity: where each is, and its version."""
        return {id(t): (where, t, _version(t)) for where, t in self._attributes()}

    def check_kept(self, before: Mapping[int, tuple[str, Tensor, int]]) -> None:
        """Refuse tensors that the last slice put into attributes, or changed there."""
        for where, tensor in self._attributes():
            if id(tensor) not in before or before[id(tensor)][2] != _version(tensor):
                raise EngineError(
                    f"Block '{self._name}' leaves a tensor of shape {tuple(tensor.shape)} in '{where}', which is that "
                    f"of one slice of the batch and has no gradient. Return it, one value for each sample, {_REST}."
                )

    def _attributes(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._modules:
            left_out = _OWN | _written_by_hooks(module)
            for key, value in module.__dict__.items():
                if key not in left_out:
                    for tensor in _inside(value):
                        yield f"{name}.{key}" if name else key, tensor

    def hooks(self) -> list[str]:
        """List the hooks of others on modules inside the block, which see its slices, with where they are."""
        found = [f"{_name_of(hook)} on all modules" for hook in _global_hooks()]
        for name, module in self._modules[1:]:  # those of the block itself see the whole batch
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                found += [f"{_name_of(hook)} on '{name}'" for key, hook in hooks.items() if key != HOOK_ID]
        return found

    def check_made(self, made: "Made", outputs: list[Tensor]) -> None:
        """Refuse tensors that a forward made and that are neither its outputs nor gone."""
        known = [
            *outputs,
            *(t for _, m in self._modules for key in _written_by_hooks(m) for t in _inside(m.__dict__[key])),
        ]
        found = made.alive(known)
        if found:
            gc.collect()  # it may only wait for that
            found = made.alive(known)
        if found:
            tensor, operation = found[0]
            hooks = self.hooks()
            who = f"a hook keeps it: {', '.join(hooks)}" if hooks else "a list or an object outside of it keeps it"
            raise EngineError(
                f"Block '{self._name}' made a tensor of shape {tuple(tensor.shape)} ({operation}) that outlives its "
                f"forward: {who}. It is that of one slice of the batch and has no gradient. Remove what keeps it, "
                f"return it from the block, one value for each sample, {_REST}."
            )

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which of its modules are in training."""
        return tuple(module.training for _, module in self._modules)

    @property
    def is_compiled(self) -> bool:
        """Whether parts of it run in graphs of a compiler, where nobody can look."""
        return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for _, m in self._modules)


class Buffers:
    """Buffers as they were.

    Arguments:
        modules: the modules whose buffers they are, by name.
        with_values: whether to keep a copy of their values.
    """

    def __init__(self, modules: tuple[tuple[str, nn.Module], ...], *, with_values: bool) -> None:
        self._held = [
            (
                f"{name}.{key}" if name else key,
                module,
                key,
                buffer,
                _version(buffer),
                buffer.detach().clone() if with_values else None,
            )
            for name, module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> list[str]:
        """Put back the buffers that have changed, where their values are known; return the names of all that have."""
        changed = []
        with torch.no_grad():
            for name, module, key, buffer, version, value in self._held:
                if module._buffers.get(key) is not buffer or _version(buffer) != version:
                    changed.append(name)
                    module._buffers[key] = buffer if value is None else buffer.copy_(value)
        return changed


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that are made while it is active, without keeping them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[tuple[weakref.ref[Tensor], str]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                self._noted.append((weakref.ref(leaf), str(func)))
        return result

    def alive(self, expected: list[Tensor]) -> list[tuple[Tensor, str]]:
        """List the tensors that are left, but for expected ones and what those are views of, each with what made it."""
        known = {id(t) for tensor in expected for t in (tensor, tensor._base)}
        return [(t, by) for noted, by in self._noted if (t := noted()) is not None and id(t) not in known]


def _inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an attribute, and in containers there."""
    rest, seen = [value], set()
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping | list | tuple | set | frozenset | deque) and id(item) not in seen:
            seen.add(id(item))
            rest += item.values() if isinstance(item, Mapping) else item


def _written_by_hooks(module: nn.Module) -> set[str]:
    """Name attributes that hooks of torch fill before each forward: computed weights (weight_norm, pruning)."""
    hooks = module._forward_pre_hooks.values()
    return {
        name
        for hook in hooks
        if type(hook).__module__.startswith("torch.nn.utils")
        for name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
        if isinstance(name, str) and name in module.__dict__
    }


def _global_hooks() -> list[Callable[..., Any]]:
    return [*global_hooks._global_forward_pre_hooks.values(), *global_hooks._global_forward_hooks.values()]


def _name_of(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
