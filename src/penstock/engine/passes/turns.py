"""What compute is doing: which forwards and backwards are under way, and which units come next."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from penstock.engine.passes.gather import Gatherer
from penstock.engine.passes.outputs import Call
from penstock.engine.units.unit import Unit
from penstock.machine.streams import Streams
from penstock.trace import NO_LABEL, Label


class Turns:
    """The forwards and backwards that are under way, for whoever has to know the innermost one.

    Arguments:
        anchors: which units each module's forward needs.
        streams: where the observer is while a trace is taken.

    Attributes:
        calls: forwards of anchors under way, outer ones first.
        active: units whose backward is under way.
    """

    def __init__(self, anchors: Mapping[nn.Module, Sequence[Unit]], streams: Streams) -> None:
        self.anchors = anchors
        self._streams = streams
        self.calls: list[Call] = []
        self.active: list[Unit] = []

    def note(self) -> None:
        """Tell a trace what compute turns to: the innermost unit's backward or forward."""
        observer = self._streams.observer
        if observer is None or not observer.is_traced:
            return
        units = self.active[-1:] or [u for call in self.calls[::-1] for u in self.anchors.get(call.module, ())][:1]
        verb = "backward" if self.active else "forward"
        observer.turn_to(Label(verb, units[0].name) if units else NO_LABEL)


class Order:
    """The sequence in which units were last used, and how far the present use has come."""

    def __init__(self, guess: Sequence[Unit]) -> None:
        self._learned = list(guess)
        self._current: list[Unit] = []
        self._position = 0
        self.was_observed = False

    @property
    def learned(self) -> Sequence[Unit]:
        """The order of the last complete pass."""
        return self._learned

    def start(self) -> None:
        """Begin a pass."""
        self._current = []
        self._position = 0

    def note(self, unit: Unit) -> None:
        """Note that a unit is used now: what is expected next is what came after it last time."""
        self._current.append(unit)
        for ahead in range(self._position, len(self._learned)):
            if self._learned[ahead] is unit:
                self._position = ahead + 1
                return

    def upcoming(self) -> Iterator[Unit]:
        """Yield the units expected next, soonest first."""
        yield from self._learned[self._position :]

    def finish(self) -> None:
        """End a pass that is complete: expect the same order next time."""
        if self._current:
            self._learned = self._current
            self.was_observed = True
        self.start()

    def replace(self, guess: Sequence[Unit]) -> None:
        """Expect another order until one is observed."""
        self._learned = list(guess)
        self.start()


class Orders:
    """Gathers each unit when it is used, and those that are expected after it.

    Attributes:
        forward, backward: the order of units in each, learned from the last one.
    """

    def __init__(self, units: Sequence[Unit], gatherer: Gatherer) -> None:
        self._units = units
        self._gatherer = gatherer
        outermost = [unit for unit in units if not any(unit.contains(other) for other in units)] or list(units)
        self.forward = Order(outermost)
        self.backward = Order(outermost[::-1])
        self._gathers = True  # some units are not resident, or are on other ranks too

    def begin_forward(self) -> None:
        """Begin a forward of the model, and look again whether units are gathered: homes may have moved."""
        self._gathers = any(not unit.resident or unit.layout.shards > 1 for unit in self._units)
        self.forward.start()

    def end_forward(self) -> None:
        """End a complete forward: expect its order next time, and its reverse in backward until one was seen."""
        self.forward.finish()
        if not self.backward.was_observed:
            self.backward.replace(self.forward.learned[::-1])

    def use(self, unit: Unit, order: Order) -> None:
        """Make a unit usable now, and start to gather those that come next in this order."""
        order.note(unit)
        self._gatherer.acquire(unit)
        if self._gathers:
            self._gatherer.prefetch(order.upcoming())
