"""Backward: units are gathered as it comes to them; what it has left is reduced and released.

Backward of a unit: gather -> compute, gradients go to the reducer -> when backward moves on to a unit outside it,
reduce and release. The outermost units stay until backward ends. Order of events never matters for the result: a
gradient that arrives after its unit was reduced is reduced again and added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.order import ActivePasses, BackwardOrder, PendingBackward
from penstock.engine.gradients.proxy import GradientProxies
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.step.context import EngineContext
from penstock.engine.step.owner_thread import UnderWay, in_backward
from penstock.engine.step.step import Stepper
from penstock.engine.unit.unit import Holder, Unit
from penstock.errors import EngineError
from penstock.runtime.modes import engine_entry, user_mode, user_records


@dataclass(eq=False)
class Backward:
    """The backward that is under way, one at a time.

    Attributes:
        gatherer: makes units usable, and gives their memory back.
        reducer: takes their gradients.
        passes: knows what compute is doing, and gathers units and those that are expected next.
        under_way: refuses other threads meanwhile.
        handles: stand for gradients between backwards.
        updates: begins updates in backward; `None` where none do.
        uses: the forwards that it comes back to.
        is_open: whether a backward has begun and has not ended.
        has_failed: whether one has failed since the last `zero_grad`.
        loss_is_scaled: whether it was called with a scaled loss, once nothing stood against it (`check`).
        closed: whether the optimizer was closed; graphs may be left.
        refusal: why none may begin now; `None` where one may.
    """

    context: EngineContext
    gatherer: Gatherer
    reducer: Reducer
    passes: ActivePasses
    under_way: UnderWay
    handles: GradientProxies
    updates: Stepper | None
    uses: BackwardOrder = field(default_factory=BackwardOrder)
    is_open: bool = False
    has_failed: bool = False
    loss_is_scaled: bool = False
    closed: bool = False
    refusal: str | None = None
    _arrived: dict[Unit, set[int]] = field(default_factory=dict)  # gradients of this backward, by slot
    _run_again: set[Unit] = field(
        default_factory=set
    )  # active units that no gradient has reached: their forward ran again

    @engine_entry
    def reach(self, use: PendingBackward, grad: Tensor) -> Tensor:
        """Enter the units of a forward whose output a gradient has reached; return the gradient to go on with."""
        if self.closed:
            raise EngineError(
                f"backward() through a graph from before close() or add_param_group(): the parameters of unit "
                f"'{use.units[0].name}' that it reads are gone. Call backward before, or run the forward again."
            )
        self._come_to(self.uses.reach(use))
        if user_records():  # create_graph
            with user_mode():
                for unit in use.units:
                    grad = unit.recorded.mark(grad)
        return grad

    def bring(self, unit: Unit) -> None:
        """Make a unit usable whose parameters backward reads, whether it was announced or not."""
        if unit.holding.backwards or unit.holding.unannounced:
            return  # it is there
        if in_backward():
            self._open()  # first: what ends without a word is looked for where one is open
        unit.holding.take(Holder.UNANNOUNCED)
        self.gatherer.acquire(unit)

    def note_silent(self, units: Sequence[Unit]) -> None:
        """Note that a forward made nothing with a backward on this rank: on another rank it may have."""
        if not self.reducer.has_peers:
            return
        # Another rank reduces these units where its backward comes to them, and waits there for this one to take part.
        if in_backward():  # of a reentrant checkpoint: its turn is now
            for unit in units:
                self.reducer.expect(unit)
        elif wanting := [unit for unit in units if unit.wants_gradient]:  # else frozen models would note for ever
            self.uses.note_silent(wanting)

    def enter(self, unit: Unit, *, runs_again: bool = False) -> None:
        """Let backward go on in this unit, or its forward run again because backward will; end units that are over."""
        if self.updates is not None:
            self.updates.check(unit)
        self._open()
        active = self.passes.active
        over = [other for other in active if not other.shares_forward(unit)]
        if runs_again and inside_a_node():  # which computes with what is active, and goes on afterwards
            over = [other for other in over if other in self._run_again]
        # Before this unit is gathered: what is over gives its memory back, and its reduction runs beside what follows.
        for other in over:
            self._leave(other)
        if not runs_again:
            self._run_again.discard(unit)
        if unit in active:
            return
        if runs_again:
            self._run_again.add(unit)
        active.append(unit)
        unit.holding.take(Holder.BACKWARD)
        self.passes.use(unit, self.passes.backward)
        self.passes.note()

    def take_gradient(self, unit: Unit, index: int, _: nn.Parameter) -> None:
        """Take the gradient that autograd has finished for a parameter from `.grad`, and hand it to the reducer."""
        parameter = unit.parameters[index]
        grad = parameter.take_gradient()
        if not (unit.resident or unit.holding.used):
            raise EngineError(
                f"Parameter '{parameter.name}' got a gradient, and no forward of {unit.label} ever ran: its "
                "values were not there when they were read (as NaN). Call the module itself, not its parts, its "
                "forward() or its weights alone; or choose units whose forward reads them, or read them inside "
                "gathered()."
            )
        if not self.is_open:  # no watched output led here: the end of backward must still be seen
            self.enter(unit)
        if self.updates is not None:
            self.updates.check(unit)
            self._arrived.setdefault(unit, set()).add(index)
        self.reducer.add(unit, index, grad)
        if len(parameter.tensor._post_accumulate_grad_hooks or ()) > 1:
            self.handles.show_to_hooks(parameter)

    def abandon(self) -> None:
        """Drop what a backward that ended with an exception has collected and gathered."""
        self.has_failed = True
        if self.updates is not None:
            self.updates.abandon()
        self.reducer.drop_pending(self.context.units)
        self._close()

    def check(self) -> None:
        """Refuse to begin where gradients were clipped. What people have put into `.grad` is there after this."""
        self.handles.look()
        self.context.gradient_scale.check_not_clipped()

    def _open(self) -> None:
        """Begin a backward, if none is open, and have autograd tell its end."""
        if self.is_open:
            self.under_way.enter("backward")  # refused to a thread that is not the one of this backward
            return
        if not self.loss_is_scaled:
            self.check()  # what was set is there before the first gradient is added to it
        if self.refusal is not None:
            raise EngineError(self.refusal)
        if self.context.gradient_scale.loss is not None and not self.loss_is_scaled:
            raise EngineError(
                "loss.backward() was called, and fp16 needs a scaled loss. Use optimizer.backward(loss), without "
                "a GradScaler."
            )
        self.handles.take_off()  # else autograd would add to them
        self.under_way.enter("backward")  # refused beside a forward, which would release what this one gathers
        self.is_open = True
        self.passes.backward.start()
        # Runs once every node of this backward has: what no later unit ends is reduced and released there.
        Variable._execution_engine.queue_callback(engine_entry(self._end))

    def _come_to(self, turns: Iterable[Sequence[Unit]]) -> None:
        """Gather units that backward comes to now, and have them reduced if this is their last forward, on every rank.

        All ranks issue these collectives in one order, also those on which nothing announces the units.
        """
        for units in turns:
            for unit in units:
                self.enter(unit)
                if self.uses.is_last(unit):
                    self.reducer.expect(unit)

    def _leave(self, unit: Unit) -> None:
        self.passes.active.remove(unit)
        unit.holding.drop(Holder.BACKWARD)  # before its end: no update begins for a unit that is held
        self._run_again.discard(unit)
        self._end_unit(unit)
        self.gatherer.release(unit)

    def _end_unit(self, unit: Unit) -> None:
        """Send the gradient home, and begin the unit's update if no other gradient will come."""
        self.reducer.flush(unit)  # the update follows the event that this leaves in the gradient's home
        if self.updates is None or self.reducer.accumulates or unit.holding.is_held:
            return
        if len(self._arrived.get(unit, ())) == len(unit.parameters):
            del self._arrived[unit]
            self.reducer.tell_host(unit)  # before the update, which asks the host whether the gradient is finite
            self.updates.begin(unit)
            if unit.resident or unit.spec.persistent:  # else it is released anyway
                self.gatherer.outdate(unit)

    def _end(self) -> None:
        """Finish what is left when autograd has come through."""
        self._come_to(self.uses.end())  # silent here, announced elsewhere: other ranks wait in their collectives
        for unit in self.context.units:
            unit.holding.end_backward()  # before it is settled: no update begins for a unit that is held
            self._end_unit(unit)
        self.passes.backward.finish()
        if not user_records():
            for unit in self.context.units:
                unit.recorded.end_unmarked()
        self.handles.put_on()
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self.passes.active.clear()
        self._run_again.clear()
        self._arrived.clear()
        self.uses.clear()
        for unit in self.context.units:
            unit.holding.end_backward()
            self.gatherer.release(unit)
            unit.holding.forget_unseen_saves()  # after its release, which goes by them
        self.gatherer.drop_unused()
        self.passes.note()
        self.under_way.leave("backward")  # last: another thread's forward may begin now


def inside_a_node() -> bool:
    """Whether autograd is in the middle of a node, which reads saved tensors that a forward makes again.

    The node of a reentrant checkpoint reads none: it only runs a forward and the backward of that.
    """
    return type(torch._C._current_autograd_node()).__name__ != "CheckpointFunctionBackward"
