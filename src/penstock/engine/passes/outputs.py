"""Where the backward of a forward begins: the tensors that it made, wherever it put them.

A gradient that reaches one of them announces the backward of the module. What the module only hands through must not
be watched: its gradient comes before or long after, and would announce one module in the middle of another's backward.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.units.unit import Unit
from penstock.machine.border import user_records

_PLAIN = (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device, nn.Module)
_LISTS = (list, tuple, set, frozenset, deque)
_CLOSED = (FunctionType, MethodType, BuiltinFunctionType, GeneratorType)  # may hold tensors where nobody can look
_MOST_OBJECTS = 1000  # looked into per output


class Call:
    """A forward that is under way: its module, and its inputs as they came.

    Attributes:
        reads: the units that were gathered because it read parameters of theirs.
        saved_hooks: the hooks that were entered for it, for what autograd saves.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reads: list[Unit] = []
        self.saved_hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._versions: dict[int, int] = {}

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs, to tell afterwards which of them were modified."""
        if user_records():
            self._versions = {id(t): _version(t) for t in _with_bases(tensors_of((args, kwargs)))}

    def made(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
        """Find the tensors with a backward that this forward made, and say whether that is all of them.

        An input that was modified in place counts. So does the tensor that an output is a view of: a change of the view
        in place takes the view's own node out of the graph.
        """
        inputs = {id(t): t for t in _with_bases(tensors_of((args, kwargs)))}
        if isinstance(output, Tensor):  # which most are
            found, complete = [output], True
        else:
            found, complete = look_into(output, _objects_in((args, kwargs)))
        handed_through = {key for key, t in inputs.items() if self._is_as_it_came(t)}
        candidates = {id(t): t for t in _with_bases(found)} | inputs
        return [t for key, t in candidates.items() if t.grad_fn is not None and key not in handed_through], complete

    def _is_as_it_came(self, tensor: Tensor) -> bool:
        version = _version(tensor)
        return self._versions.get(id(tensor), version) == version


def watch_first(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Register a hook of a tensor before those it has: a module is announced before one inside it that made the tensor.

    Else the order would depend on which of them made it, and with that on the way that a rank took inside of them.
    """
    before = list(tensor._backward_hooks or ())
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for key in before:  # autograd calls them as they were put in, whatever `move_to_end` says
        tensor._backward_hooks[key] = tensor._backward_hooks.pop(key)  # type: ignore[index, union-attr]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, sets and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif (items := _items(value)) is not None:
        for item in items:
            yield from tensors_of(item)


def look_into(value: Any, known: Set[int] = frozenset()) -> tuple[list[Tensor], bool]:
    """Find the tensors in nested containers and attributes of objects, and say whether everything could be looked into.

    Arguments:
        value: what a module has returned.
        known: the identities of objects to leave out.
    """
    tensors: list[Tensor] = []
    complete = True
    seen: set[int] = set()
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            tensors.append(item)
            continue
        if item is None or isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        items = _items(item)
        if items is None and id(item) not in known:
            items = _attributes(item)
            complete = complete and items is not None
        if len(seen) > _MOST_OBJECTS:
            return tensors, False
        rest += items or ()
    return tensors, complete


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, _LISTS):  # first: most are arguments, and an abstract class is slow to say
        return list(value)
    return list(value.values()) if isinstance(value, (dict, Mapping)) else None


def _attributes(value: Any) -> list[Any] | None:
    """List what an object's attributes hold, without running its code; `None` where that cannot be known."""
    if isinstance(value, _CLOSED):
        return None
    slots = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _objects_in(value: Any) -> set[int]:
    """Collect the identities of what is neither tensor nor container in nested containers."""
    items = _items(value)
    if items is None:
        return set() if isinstance(value, Tensor) else {id(value)}
    return set().union(*map(_objects_in, items))


def _with_bases(tensors: Iterator[Tensor] | list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor
        if tensor._base is not None:
            yield tensor._base


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
