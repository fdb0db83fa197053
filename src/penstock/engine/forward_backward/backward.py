"""Backward: gather each unit when backward reaches it; reduce its gradients and release it when backward leaves it.

Backward leaves a unit when it reaches another unit whose forward does not run inside the first one's. The outermost
units stay gathered until backward ends. The order of events never changes the result: a gradient that arrives after
its unit was reduced is reduced again and added.
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
from penstock.engine.step.owner_thread import OwnerThread, in_backward
from penstock.engine.step.step import Stepper
from penstock.engine.unit.unit import Holder, Unit
from penstock.errors import EngineError
from penstock.runtime.modes import engine_entry, user_mode, user_records


@dataclass(eq=False)
class Backward:
    """The backward that is under way, one at a time.

    Attributes:
        gatherer: gathers and releases units.
        reducer: takes the gradients.
        passes: the units that compute works on, and the order in which units are used.
        owner_thread: refuses other threads during a backward.
        proxies: the gradient proxies in `.grad` between backwards.
        updates: begins updates during backward; `None` where updates wait for the step.
        uses: the forwards whose backward is still to come.
        is_open: True while a backward is under way.
        has_failed: True if a backward has failed since the last `zero_grad`.
        loss_is_scaled: True while `optimizer.backward` runs, which scales the loss and calls `check` first.
        closed: True once the optimizer was closed. Graphs from before may still exist.
        refusal: the error of a backward that begins now; `None` if it may begin.
    """

    context: EngineContext
    gatherer: Gatherer
    reducer: Reducer
    passes: ActivePasses
    owner_thread: OwnerThread
    proxies: GradientProxies
    updates: Stepper | None
    uses: BackwardOrder = field(default_factory=BackwardOrder)
    is_open: bool = False
    has_failed: bool = False
    loss_is_scaled: bool = False
    closed: bool = False
    refusal: str | None = None
    _arrived: dict[Unit, set[int]] = field(default_factory=dict)  # gradients of this backward, by slot
    #: Active units that no gradient has reached yet: their forward ran again.
    _run_again: set[Unit] = field(default_factory=set)

    @engine_entry
    def reach(self, use: PendingBackward, grad: Tensor) -> Tensor:
        """Enter the units of a forward when a gradient reaches its output; return the gradient to go on with."""
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
        """Gather a unit whose parameters backward reads, also where no gradient has announced its backward."""
        if unit.holding.backwards or unit.holding.unannounced:
            return  # it is gathered
        if in_backward():
            self._open()  # first: only an open backward is abandoned if it ends with an exception
        unit.holding.take(Holder.UNANNOUNCED)
        self.gatherer.acquire(unit)

    def note_silent(self, units: Sequence[Unit]) -> None:
        """Note a forward whose outputs have no backward on this rank, while they may have one on another rank."""
        if not self.reducer.has_peers:
            return
        # Another rank reduces these units where its backward comes to them, and waits there for this one to take part.
        if in_backward():  # the forward of a reentrant checkpoint: its turn is now
            for unit in units:
                self.reducer.expect(unit)
        elif wanting := [unit for unit in units if unit.wants_gradient]:  # not for ever, of a frozen model
            self.uses.note_silent(wanting)

    def enter(self, unit: Unit, *, runs_again: bool = False) -> None:
        """Gather a unit for its backward, or for a forward that runs again in backward; leave units that are over."""
        if self.updates is not None:
            self.updates.check(unit)
        self._open()
        active = self.passes.active
        over = [other for other in active if not other.shares_forward(unit)]
        if runs_again and inside_a_node():  # the node goes on to compute with the active units afterwards
            over = [other for other in over if other in self._run_again]
        # Before this unit is gathered: a unit that is over frees its memory, and its reduction runs beside this gather.
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
        """Take the finished gradient of a parameter out of `.grad`, and pass it to the reducer."""
        parameter = unit.parameters[index]
        grad = parameter.take_gradient()
        if not (unit.resident or unit.holding.used):
            raise EngineError(
                f"Parameter '{parameter.name}' got a gradient, and no forward of {unit.label} ever ran: its "
                "values were not there when they were read (as NaN). Call the module itself, not its parts, its "
                "forward() or its weights alone; or choose units whose forward reads them, or read them inside "
                "gathered()."
            )
        if not self.is_open:  # no watched output led here: the callback at the end of backward is still needed
            self.enter(unit)
        if self.updates is not None:
            self.updates.check(unit)
            self._arrived.setdefault(unit, set()).add(index)
        self.reducer.add(unit, index, grad)
        if len(parameter.tensor._post_accumulate_grad_hooks or ()) > 1:
            self.proxies.show_to_hooks(parameter)

    def abandon(self) -> None:
        """Drop the gradients and gathers of a backward that ended with an exception."""
        self.has_failed = True
        if self.updates is not None:
            self.updates.abandon()
        self.reducer.drop_pending()
        self._close()

    def check(self) -> None:
        """Take over values that the user put into `.grad`, and refuse a backward after gradients were clipped."""
        self.proxies.look()
        self.context.gradient_scale.check_not_clipped()

    def _open(self) -> None:
        """Begin a backward if none is open, and queue the callback for its end."""
        if self.is_open:
            self.owner_thread.enter("backward")  # raises an error in a thread other than this backward's
            return
        if not self.loss_is_scaled:
            self.check()  # a value that was set is in the storage before the first gradient is added to it
        if self.refusal is not None:
            raise EngineError(self.refusal)
        if self.context.gradient_scale.loss is not None and not self.loss_is_scaled:
            raise EngineError(
                "loss.backward() was called, and fp16 needs a scaled loss. Use optimizer.backward(loss), without "
                "a GradScaler."
            )
        self.proxies.take_off()  # autograd would add to the proxies
        self.owner_thread.enter("backward")  # raises beside another thread's forward, which would release these gathers
        self.is_open = True
        self.passes.backward.start()
        # Runs after the last node of this backward: it reduces and releases the units that no later unit has ended.
        Variable._execution_engine.queue_callback(engine_entry(self._end))

    def _come_to(self, turns: Iterable[Sequence[Unit]]) -> None:
        """Gather the units that backward reaches now. The last forward of a unit makes its reduction due.

        Ranks on which no gradient announces these units do the same at this point (ordering rule 4).
        """
        for units in turns:
            for unit in units:
                self.enter(unit)
                if self.uses.is_last(unit):
                    self.reducer.expect(unit)

    def _leave(self, unit: Unit) -> None:
        self.passes.active.remove(unit)
        unit.holding.drop(Holder.BACKWARD)  # before its end: no update begins while a unit is held
        self._run_again.discard(unit)
        self._end_unit(unit)
        self.gatherer.release(unit)

    def _end_unit(self, unit: Unit) -> None:
        """Reduce the gradient, and begin the unit's update if all of its gradients have arrived."""
        self.reducer.flush(unit)  # the update follows the write that this records in the gradient's storage
        if self.updates is None or self.reducer.accumulates or unit.holding.is_held:
            return
        if len(self._arrived.get(unit, ())) == len(unit.parameters):
            del self._arrived[unit]
            self.reducer.tell_host(unit)  # before the update: the host decides by it if the gradient is finite
            self.updates.begin(unit)
            if unit.resident or unit.spec.persistent:  # all other units are released anyway
                self.gatherer.outdate(unit)

    def _end(self) -> None:
        """Reduce and release all units that are left. Autograd calls it after the last node."""
        self._come_to(self.uses.end())  # other ranks may have their backward, and wait in its collectives
        for unit in self.context.units:
            unit.holding.drop_all(Holder.BACKWARD, Holder.UNANNOUNCED)  # first: no update begins while a unit is held
            self._end_unit(unit)
        self.passes.backward.finish()
        if not user_records():
            for unit in self.context.units:
                unit.recorded.end_unmarked()
        self.proxies.put_on()
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self.passes.active.clear()
        self._run_again.clear()
        self._arrived.clear()
        self.uses.clear()
        for unit in self.context.units:
            unit.holding.drop_all(Holder.BACKWARD, Holder.UNANNOUNCED)
            self.gatherer.release(unit)
            unit.holding.forget_unseen_saves()  # after the release, which depends on it
        self.gatherer.drop_unused()
        self.passes.note()
        self.owner_thread.leave("backward")  # last: another thread's forward may begin now


def inside_a_node() -> bool:
    """Return True if autograd runs a node that reads saved tensors which a forward computes again.

    The node of a reentrant checkpoint reads none: it only runs a forward and the backward of that forward.
    """
    return type(torch._C._current_autograd_node()).__name__ != "CheckpointFunctionBackward"
