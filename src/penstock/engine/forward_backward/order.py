"""The order of forwards and backwards: learned, and followed."""

from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
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
# The forwards that backward comes back to, on this rank or on others.
#
# All ranks run the same units in the same order, and each goes its own way inside of them: other experts, or no
# parameter at all. The backward of a forward that made nothing here is not announced here, while on another rank it
# may be. It is due where that rank comes to it: after what ran later, before what ran earlier.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingBackward:
    """A forward whose backward will be announced.

    Attributes:
        units: the units of its anchor.
        silent: the units of each forward between this one and the next whose backward will not be announced.
    """

    units: Sequence[Unit]
    silent: list[Sequence[Unit]] = field(default_factory=list)


class BackwardOrder:
    """Notes forwards as they end, and says where the silent ones have their turn in backward."""

    def __init__(self) -> None:
        self._first = self._last = PendingBackward(())
        self._reached: set[PendingBackward] = set()  # in this backward
        self._open: Counter[Unit] = Counter()  # forwards since the last backward that it has not come back to

    def note(self, units: Sequence[Unit]) -> PendingBackward:
        """Note that a forward has ended whose backward will be announced; return what it is announced by."""
        self._last = PendingBackward(units)
        self._add(units, 1)
        return self._last

    def note_silent(self, units: Sequence[Unit]) -> None:
        """Note that a forward has ended that made nothing with a backward."""
        self._last.silent.append(units)
        self._add(units, 1)

    def reach(self, use: PendingBackward) -> list[Sequence[Unit]]:
        """Note that a backward is announced; return whose turn it is, in order: silent forwards, then its own units."""
        if use in self._reached:
            return [use.units]
        self._reached.add(use)
        turns = [*use.silent[::-1], use.units]
        for units in turns:
            self._add(units, -1)
        return turns

    def end(self) -> list[Sequence[Unit]]:
        """Return, at the end of backward, the units of the silent forwards that ran before all others."""
        return self.reach(self._first)

    def is_last(self, unit: Unit) -> bool:
        """Whether backward has come back to every forward of the unit."""
        return self._open[unit] <= 0

    def clear(self) -> None:
        """Forget every forward: backward is over."""
        self._first = self._last = PendingBackward(())
        self._reached.clear()
        self._open.clear()

    def _add(self, units: Sequence[Unit], count: int) -> None:
        for unit in units:  # by hand: a counter's own methods look first at what they are given, and mostly it is one
            self._open[unit] += count


# ----------------------------------------------------------------------------------------------------------------------
# Where the backward of a forward begins: the tensors that it made, wherever it put them.
#
# A gradient that reaches one of them announces the backward of the module. What the module only hands through must not
# be watched: its gradient comes before or long after, and would announce one module in the middle of another's
# backward.
# ----------------------------------------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device, nn.Module)
_LISTS = (list, tuple, set, frozenset, deque)
_CLOSED = (FunctionType, MethodType, BuiltinFunctionType, GeneratorType)  # may hold tensors where nobody can look
_MOST_OBJECTS = 1000  # looked into per output


@dataclass(eq=False)
class ForwardCall:
    """A forward that is under way: its module, and its inputs as they came.

    Attributes:
        reads: the units that were gathered because it read parameters of theirs.
        saved_hooks: the hooks that were entered for it, for what autograd saves.
        versions: the versions of its inputs, by their identities.
    """

    module: nn.Module
    reads: list[Unit] = field(default_factory=list)
    saved_hooks: torch.autograd.graph.saved_tensors_hooks | None = None
    versions: dict[int, int] = field(default_factory=dict)

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs, to tell afterwards which of them were modified."""
        if user_records():
            self.versions = {key: _version(t) for key, t in look_into((args, kwargs)).tensors.items()}

    def made(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
        """Find the tensors with a backward that this forward made, and say whether that is all of them.

        An input that was modified in place counts. So does the tensor that an output is a view of: a change of the view
        in place takes the view's own node out of the graph.
        """
        given = look_into((args, kwargs))
        found = look_into(output, known=given.objects)
        handed_through = {key for key, t in given.tensors.items() if self.versions.get(key) in (None, _version(t))}
        candidates = found.tensors | given.tensors
        made = [t for key, t in candidates.items() if t.grad_fn is not None and key not in handed_through]
        return made, found.complete


def watch_first(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> None:
    """Register a hook of a tensor before those it has: a module is announced before one inside it that made the tensor.

    Else the order would depend on which of them made it, and with that on the way that a rank took inside of them.
    """
    before = list(tensor._backward_hooks or ())
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for key in before:  # autograd calls them as they were put in, whatever `move_to_end` says
        tensor._backward_hooks[key] = tensor._backward_hooks.pop(key)  # type: ignore[index, union-attr]


class Found(NamedTuple):
    """What there is in nested containers and objects.

    Attributes:
        tensors: the tensors, and those that they are views of, by their identity.
        objects: all that is neither tensor nor plain value, by its identity.
        complete: whether everything could be looked into.
    """

    tensors: dict[int, Tensor]
    objects: dict[int, Any]
    complete: bool


def look_into(value: Any, *, known: Container[int] | None = None) -> Found:
    """Find the tensors in nested containers and, where some objects are known, in the attributes of all others.

    Arguments:
        value: what a module was given, or has returned.
        known: the identities of objects to leave out; `None` for all objects.
    """
    tensors: dict[int, Tensor] = {}
    objects: dict[int, Any] = {}  # kept meanwhile: another one may get the identity of one that is gone
    complete = True
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, Tensor):
            tensors[id(item)] = item
            rest.append(item._base)
        elif item is not None and not isinstance(item, _PLAIN) and id(item) not in objects:
            objects[id(item)] = item
            if isinstance(item, _LISTS):  # first: most are arguments, and an abstract class is slow to say
                rest += item
            elif isinstance(item, (dict, Mapping)):
                rest += item.values()
            elif known is not None and id(item) not in known:
                attributes = _attributes(item)
                complete = complete and attributes is not None
                rest += attributes or ()
            if known is not None and len(objects) > _MOST_OBJECTS:
                return Found(tensors, objects, False)
    return Found(tensors, objects, complete)


def _attributes(value: Any) -> list[Any] | None:
    """List what an object's attributes hold, without running its code; `None` where that cannot be known."""
    if isinstance(value, _CLOSED):
        return None
    slots = [name for cls in type(value).__mro__ for name in cls.__dict__.get("__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# ----------------------------------------------------------------------------------------------------------------------
# What compute is doing: which forwards and backwards are under way, and which units come next.
# ----------------------------------------------------------------------------------------------------------------------


class UsageOrder:
    """The sequence in which units were last used, and how far the present use has come.

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
        """Note that a unit is used now: what is expected next is what came after it last time."""
        self._current.append(unit)
        for ahead in range(self._position, len(self.learned)):
            if self.learned[ahead] is unit:
                self._position = ahead + 1
                return

    def upcoming(self) -> Sequence[Unit]:
        """List the units expected next, soonest first."""
        return self.learned[self._position :]

    def finish(self) -> None:
        """End a pass that is complete: expect the same order next time."""
        self.learned = self._current or self.learned
        self.start()


class ActivePasses:
    """The forwards and backwards that are under way, and the units that come next in them.

    Arguments:
        gatherer: gathers each unit when it is used, and those that are expected after it.
        anchors: which units each module's forward needs.

    Attributes:
        calls: forwards of anchors under way, outer ones first.
        active: units whose backward is under way.
        forward, backward: the order of units in each, learned from the last one.
    """

    def __init__(self, context: EngineContext, gatherer: Gatherer, anchors: Mapping[nn.Module, Sequence[Unit]]) -> None:
        self._context = context
        self._gatherer = gatherer
        self.anchors = anchors
        self.calls: list[ForwardCall] = []
        self.active: list[Unit] = []
        units = context.units
        outermost = [unit for unit in units if not any(unit.contains(other) for other in units)] or units
        self.forward = UsageOrder(outermost)
        self.backward = UsageOrder(outermost[::-1])
        self._gathers = True  # some units are not resident, or are on other ranks too

    def begin_forward(self) -> None:
        """Begin a forward of the model, and look again whether units are gathered: homes may have moved."""
        self._gathers = any(not unit.resident or unit.layout.shards > 1 for unit in self._context.units)
        self.forward.start()

    def use(self, unit: Unit, order: UsageOrder) -> None:
        """Make a unit usable now, and start to gather those that come next in this order."""
        order.note(unit)
        self._gatherer.acquire(unit)
        if self._gathers:
            self._gatherer.prefetch(order.upcoming())

    def note(self) -> None:
        """Tell a trace what compute turns to: the innermost unit's backward or forward."""
        observer = self._context.streams.observer
        if observer is None or not observer.is_traced:
            return
        units = self.active[-1:] or [u for call in self.calls[::-1] for u in self.anchors.get(call.module, ())][:1]
        verb = "backward" if self.active else "forward"
        observer.turn_to(Label(verb, units[0].name) if units else NO_LABEL)
