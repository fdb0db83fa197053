"""The order in which forward and backward use units."""

from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.unit import Unit
from penstock.runtime.modes import user_records
from penstock.trace import NO_LABEL, Label

# ----------------------------------------------------------------------------------------------------------------------
# Forwards whose backward is still to come, on this rank or on others.
#
# All ranks run the same units in the same order. Inside a unit each rank may use other parameters (experts), or none.
# So a forward may have no backward on this rank and one on another rank. Its collectives are due at the same point of
# the order on every rank: after the backward of later forwards, before that of earlier ones (ordering rule 4).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingBackward:
    """A forward whose backward will be announced.

    Attributes:
        units: the units of its module.
        silent: for each forward after it and before the next announced one, its units. No gradient announces those.
    """

    units: Sequence[Unit]
    silent: list[Sequence[Unit]] = field(default_factory=list)


class BackwardOrder:
    """The forwards of a graph in the order of their ends, and the point in backward at which each silent one is due."""

    def __init__(self) -> None:
        self._first = self._last = PendingBackward(())
        self._reached: set[PendingBackward] = set()  # in this backward
        self._open: Counter[Unit] = Counter()  # forwards since the last backward that are still to come

    def note(self, units: Sequence[Unit]) -> PendingBackward:
        """Note a forward whose backward will be announced; return what the announcement passes to `reach`."""
        self._last = PendingBackward(units)
        self._add(units, 1)
        return self._last

    def note_silent(self, units: Sequence[Unit]) -> None:
        """Note a forward whose outputs have no backward on this rank."""
        self._last.silent.append(units)
        self._add(units, 1)

    def reach(self, use: PendingBackward) -> list[Sequence[Unit]]:
        """Note that a backward is announced; return the units that are due: of silent forwards, then of this one."""
        if use in self._reached:
            return [use.units]
        self._reached.add(use)
        turns = [*use.silent[::-1], use.units]
        for units in turns:
            self._add(units, -1)
        return turns

    def end(self) -> list[Sequence[Unit]]:
        """Return the units of the silent forwards that ran before all announced ones: they are due at the end."""
        return self.reach(self._first)

    def is_last(self, unit: Unit) -> bool:
        """Return True if backward has reached every forward of the unit."""
        return self._open[unit] <= 0

    def clear(self) -> None:
        """Forget every forward: backward is over."""
        self._first = self._last = PendingBackward(())
        self._reached.clear()
        self._open.clear()

    def _add(self, units: Sequence[Unit], count: int) -> None:
        for unit in units:  # not by Counter.update, which is slower for one unit
            self._open[unit] += count


# ----------------------------------------------------------------------------------------------------------------------
# The tensors that a forward made, in whatever containers and objects it returned them.
#
# A gradient that reaches one of them announces the backward of the module. An input that the module returns unchanged
# is not watched: its gradient may come before or long after this module's backward.
# ----------------------------------------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device, nn.Module)
_LISTS = (list, tuple, set, frozenset, deque)
_CLOSED = (FunctionType, MethodType, BuiltinFunctionType, GeneratorType)  # may hold tensors in closures
_MOST_OBJECTS = 1000  # looked into per output


@dataclass(eq=False)
class ForwardCall:
    """A forward that is under way.

    Attributes:
        module: the module that runs.
        reads: the units that were gathered because this forward read their parameters.
        saved_hooks: the saved-tensor hooks that were entered for it.
        versions: the versions of its inputs, by their identities.
    """

    module: nn.Module
    reads: list[Unit] = field(default_factory=list)
    saved_hooks: torch.autograd.graph.saved_tensors_hooks | None = None
    versions: dict[int, int] = field(default_factory=dict)

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the versions of the inputs, by which `made` finds inputs that were modified in place."""
        if user_records():
            self.versions = {key: _version(t) for key, t in look_into((args, kwargs)).tensors.items()}

    def made(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
        """Find the tensors with a backward that this forward made; the bool is True if these are all of them.

        An input that was modified in place counts, and so does the base of an output that is a view: a later change of
        the view in place takes the view's own node out of the graph.
        """
        given = look_into((args, kwargs))
        found = look_into(output, known=given.objects)
        handed_through = {key for key, t in given.tensors.items() if self.versions.get(key) in (None, _version(t))}
        candidates = found.tensors | given.tensors
        made = [t for key, t in candidates.items() if t.grad_fn is not None and key not in handed_through]
        return made, found.complete


def watch_first(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Register a hook of a tensor before the hooks it has: an outer module is announced before the inner one.

    Otherwise the order would depend on which of the two made the tensor, and could differ between ranks.
    """
    before = list(tensor._backward_hooks or ())
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for key in before:  # autograd calls them as they were put in, whatever `move_to_end` says
        tensor._backward_hooks[key] = tensor._backward_hooks.pop(key)  # type: ignore[index, union-attr]


class NestedContents(NamedTuple):
    """The contents of nested containers and objects.

    Attributes:
        tensors: the tensors, and those that they are views of, by their identity.
        objects: everything that is neither a tensor nor a plain value, by its identity.
        complete: True if all objects could be looked into.
    """

    tensors: dict[int, Tensor]
    objects: dict[int, Any]
    complete: bool


def look_into(value: Any, *, known: Container[int] | None = None) -> NestedContents:
    """Find the tensors in nested containers and in attributes of objects.

    Arguments:
        value: the inputs or the output of a module.
        known: identities of objects whose attributes are left out; `None` leaves out those of all objects.
    """
    tensors: dict[int, Tensor] = {}
    objects: dict[int, Any] = {}  # by reference: the identity of a freed object may be reused
    complete = True
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            tensors[id(item)] = item
            rest.append(item._base)
        elif item is not None and not isinstance(item, _PLAIN) and id(item) not in objects:
            objects[id(item)] = item
            if isinstance(item, _LISTS):  # first: `isinstance` of an abstract class is slow
                rest += item
            elif isinstance(item, (dict, Mapping)):
                rest += item.values()
            elif known is not None and id(item) not in known:
                attributes = _attributes(item)
                complete = complete and attributes is not None
                rest += attributes or ()
            if known is not None and len(objects) > _MOST_OBJECTS:
                return NestedContents(tensors, objects, False)
    return NestedContents(tensors, objects, complete)


def _attributes(value: Any) -> list[Any] | None:
    """Return the values of an object's attributes without running its code; `None` if they cannot be known."""
    if isinstance(value, _CLOSED):
        return None
    slots = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# ----------------------------------------------------------------------------------------------------------------------
# The forwards and backwards that are under way, and the units that come next.
# ----------------------------------------------------------------------------------------------------------------------


class UsageOrder:
    """The sequence in which units were last used, and the position in it of the pass under way.

    Attributes:
        learned: the order of the last complete pass.
    """

    def __init__(self, guess: Sequence[Unit]) -> None:
        self.learned = list(guess)
        self._current: list[Unit] = []
        self._position = 0

    def start(self) -> None:
        """Begin a pass."""
        self._current = []
        self._position = 0

    def note(self, unit: Unit) -> None:
        """Note that a unit is used now. The units after it in the learned order are expected next."""
        self._current.append(unit)
        with suppress(ValueError):  # another unit than was learned moves nothing
            self._position = self.learned.index(unit, self._position) + 1

    def upcoming(self) -> Sequence[Unit]:
        """Return the units that are expected next, soonest first."""
        return self.learned[self._position :]

    def finish(self) -> None:
        """End a complete pass and learn its order."""
        self.learned = self._current or self.learned
        self.start()


class ActivePasses:
    """The forwards and backwards that are under way, and the units that come next in them.

    Arguments:
        gatherer: gathers each unit when it is used, and the units that are expected after it.
        hooked_modules: the units that each module's forward needs.

    Attributes:
        calls: the forwards under way, outer ones first.
        active: the units whose backward is under way.
        forward, backward: the order of units in each, learned from the last pass.
    """

    def __init__(
        self, context: EngineContext, gatherer: Gatherer, hooked_modules: Mapping[nn.Module, Sequence[Unit]]
    ) -> None:
        self._context = context
        self._gatherer = gatherer
        self.hooked_modules = hooked_modules
        self.calls: list[ForwardCall] = []
        self.active: list[Unit] = []
        units = context.units
        outermost = [unit for unit in units if not any(unit.contains(other) for other in units)] or units
        self.forward = UsageOrder(outermost)
        self.backward = UsageOrder(outermost[::-1])
        self._gathers = True  # some units are not resident, or are sharded

    def begin_forward(self) -> None:
        """Begin a forward of the model. State may have moved since the last one: look again if units are gathered."""
        self._gathers = any(not unit.resident or unit.layout.shards > 1 for unit in self._context.units)
        self.forward.start()

    def use(self, unit: Unit, order: UsageOrder) -> None:
        """Gather a unit now, and start to gather the units that come next in this order."""
        order.note(unit)
        self._gatherer.acquire(unit)
        if self._gathers:
            self._gatherer.prefetch(order.upcoming())

    def note(self) -> None:
        """Tell a trace which unit compute works on: the innermost backward or forward."""
        observer = self._context.streams.observer
        if observer is None or not observer.is_traced:
            return
        units = (
            self.active[-1:] or [u for call in self.calls[::-1] for u in self.hooked_modules.get(call.module, ())][:1]
        )
        verb = "backward" if self.active else "forward"
        observer.turn_to(Label(verb, units[0].name) if units else NO_LABEL)
