"""Values that a call takes, with some of their tensors replaced: only what holds one of those is made anew."""

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from penstock.errors import EngineError


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists, sets, mappings and dataclasses, of any class.

    What `change` returns as it came stays in the object that it was in: a cache that a model fills is the caller's own.
    A container of which something is replaced is copied without its constructor, so named tuples, frozen dataclasses,
    fields without `init` and classes that check their arguments are what they were. A tensor that is there twice is
    replaced by one and the same.

    Raises:
        EngineError: a container that cannot be copied; names its class.
    """
    return _Replacement(change).of(value)


class _Replacement:
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change = change
        self._done: dict[int, Any] = {}  # by identity: the arguments keep what it names alive

    def of(self, value: Any) -> Any:
        if isinstance(value, str | bytes | int | float | None):
            return value
        known = self._done.get(id(value), self)
        if known is not self:
            return known
        self._done[id(value)] = value  # for a container that holds itself
        made = self._change(value) if isinstance(value, Tensor) else self._container(value)
        self._done[id(value)] = made
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return self._rebuilt(value, _as_tuple)
        if isinstance(value, list | deque):
            return self._rebuilt(value, _as_list)
        if isinstance(value, set | frozenset):
            return self._rebuilt(value, lambda whole, items: type(whole)(items))
        if isinstance(value, MappingProxyType):
            items = self.of(dict(value))
            return MappingProxyType(items) if any(items[key] is not value[key] for key in value) else value
        if isinstance(value, dict | UserDict):
            return self._with(value, value.items(), lambda twin, key, item: twin.__setitem__(key, item))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = [
                (field.name, getattr(value, field.name))
                for field in dataclasses.fields(value)
                if hasattr(value, field.name)
            ]
            return self._with(value, held, object.__setattr__)
        if isinstance(value, Mapping) and hasattr(value, "__dict__"):  # of a class of its own: what it keeps them in
            return self._with(value, vars(value).items(), object.__setattr__)
        return value

    def _rebuilt(self, value: Any, build: Callable[[Any, list[Any]], Any]) -> Any:
        items = [self.of(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _copied(value, lambda: build(value, items))

    def _with(self, value: Any, held: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None]) -> Any:
        """Return the object itself where nothing of it changes, else a copy with the changed values put in."""
        held = list(held)
        changed = [(key, new) for key, old in held if (new := self.of(old)) is not old]
        if not changed:
            return value

        def build() -> Any:
            twin = copy.copy(value)
            for key, item in changed:
                put(twin, key, item)
            return twin

        return _copied(value, build)


def _as_tuple(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    if hasattr(kind, "n_sequence_fields"):  # what torch functions return: made by its own constructor alone
        return kind(items)
    twin = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        twin.__dict__.update(value.__dict__)
    return twin


def _as_list(value: Any, items: list[Any]) -> Any:
    if type(value) is list:
        return items
    twin = copy.copy(value)
    for index, item in enumerate(items):
        twin[index] = item
    return twin


def _copied(value: Any, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except Exception as error:
        raise EngineError(
            f"An input of class {type(value).__name__} holds floating-point tensors that are not in the compute dtype, "
            f"and cannot be copied to cast them ({type(error).__name__}: {error}). Cast them before the call, or use "
            "Options(cast_inputs='none')."
        ) from error
