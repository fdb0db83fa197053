"""What modules and autograd tell the engine, and what it does about it.

Forward of an anchor: gather its units -> compute -> release them. Backward of a unit: gather -> compute, gradients go
to the reducer -> when backward moves on to a unit outside it, reduce and release. The outermost units stay until
backward ends. Order of events never matters for the result: a gradient that arrives after its unit was reduced is
reduced again and added.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from penstock.engine.passes.activations import Activations
from penstock.engine.passes.anchor import Anchor, run_last
from penstock.engine.passes.gather import Gatherer, Order
from penstock.engine.passes.outputs import Call, tensors_of, watch_first
from penstock.engine.passes.precision import InputCasts
from penstock.engine.passes.reduce import Reducer
from penstock.engine.passes.saved import SavedTensors
from penstock.engine.passes.transforms import check_transform
from penstock.engine.passes.under_way import UnderWay, in_backward
from penstock.engine.passes.uses import Use, Uses
from penstock.engine.units.holding import Holder
from penstock.engine.units.membership import Membership
from penstock.engine.units.reads import watch_reads
from penstock.engine.units.unit import Unit
from penstock.engine.units.weakly import weakly
from penstock.engine.updates.rig import Rig
from penstock.errors import EngineError
from penstock.machine.border import crossing, theirs, user_records
from penstock.trace import NO_LABEL, Label


class BackwardUpdates(Protocol):
    """Updates that begin in backward."""

    def begin(self, unit: Unit) -> None:
        """All gradients of the unit have come."""

    def check(self, unit: Unit) -> None:
        """Raise an error where backward comes back to a unit whose update has begun."""

    def abandon(self) -> None:
        """Backward has failed."""


class Hooks:
    """Connects a model to a gatherer and a reducer.

    Arguments:
        gatherer: makes units usable, and gives their memory back.
        reducer: takes their gradients.
        casts: of floating-point inputs.
        membership: the modules of the parameters, looked at when a forward of the model begins.
        updates: what begins in backward; `None` for nothing.
        activations: takes what forward saves; `None` leaves it.
    """

    def __init__(
        self,
        rig: Rig,
        gatherer: Gatherer,
        reducer: Reducer,
        casts: InputCasts,
        membership: Membership,
        updates: BackwardUpdates | None,
        activations: Activations | None,
    ) -> None:
        units = rig.units
        self._model = rig.model
        self._units = units
        self._gatherer = gatherer
        self._reducer = reducer
        self._casts = casts
        self._membership = membership
        self._streams = rig.streams
        self._updates = updates
        self._gradient_scale = rig.gradient_scale
        self._activations = activations
        if activations is not None:
            activations.interrupted = self._clean_up
        self.loss_is_scaled = False  # the backward under way was called with a scaled loss
        self._arrived: dict[Unit, set[int]] = {}  # gradients of this backward, by slot
        self.under_way = UnderWay(self._clean_up)
        self._removed = False
        self._calls: list[Call] = []  # forwards of anchors under way, outer ones first
        self._uses = Uses()
        self._active: list[Unit] = []  # units whose backward is under way
        self._run_again: set[Unit] = set()  # those of them that no gradient has reached: their forward ran again
        owners = {parameter: unit for unit in units for parameter in unit.spec.parameters}
        self._saved = SavedTensors(gatherer.owner_of, owners, self._bring, activations)
        self._gathers = True  # some units are not resident, or are on other ranks too
        self.backward_open = False
        self.backward_failed = False  # since the last zero_grad
        in_order = [unit for unit in units if not any(unit.contains(other) for other in units)] or list(units)
        self._forward_order = Order(in_order)
        self._backward_order = Order(in_order[::-1])
        self._anchors: dict[nn.Module, tuple[Unit, ...]] = {}
        for unit in units:
            for anchor in unit.spec.anchors:
                self._anchors[anchor] = (*self._anchors.get(anchor, ()), unit)
        self._handles: list[RemovableHandle] = []
        self._hooked: list[Anchor] = []
        self._attach()

    def _attach(self) -> None:
        untraced = partial(torch.compiler.disable, reason="A unit of Penstock is gathered or released between graphs.")
        before, after = untraced(crossing(self._before_forward)), untraced(crossing(self._after_forward))
        owners = {parameter: unit for unit in self._units for parameter in unit.spec.parameters}
        for unit, watches in watch_reads(self._model, owners, untraced(crossing(self._gather_for_read))).items():
            unit.watch_reads(watches)
        for module in {self._model: (), **self._anchors}:
            units = self._anchors.get(module, ())
            cast = self._casts.of_layer(module)
            anchor = Anchor(units, always=module is self._model, before=before, after=after, cast=cast)
            self._handles += anchor.attach(module)
            self._hooked.append(anchor)
        for unit in self._units:
            for index, parameter in enumerate(unit.spec.parameters):
                take: Callable[[nn.Parameter], None]
                if unit.trained:
                    take = crossing(weakly(self._take_gradient, unit, index))
                elif parameter.requires_grad:
                    take = crossing(_drop_gradient)
                else:
                    continue
                handle = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook off the model."""
        self._forget_uses()  # of a forward that an interrupt ended
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for unit in self._units:
            for watch in unit.reads:
                watch.end()
        self._removed = True

    def rest(self) -> None:
        """Between steps: give memory back that the next forward can take again."""
        if self._activations is not None:
            self._activations.rest()

    def close(self) -> None:
        """Let go of memory that is given back now. Nothing is under way."""
        if self._activations is not None:
            self._activations.close()

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is under way."""
        return bool(self._calls)

    def in_use(self, unit: Unit) -> bool:
        """Whether compute may read the unit's parameters now."""
        return unit.holding.is_held

    def abandon_backward(self) -> None:
        """A backward ended with an exception: drop what it collected and gathered."""
        self.backward_failed = True
        if self._updates is not None:
            self._updates.abandon()
        self._reducer.drop_pending(self._units)
        self._close_backward()

    # Forward

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        units = self._anchors.get(module, ())
        recomputing = in_backward()
        if not recomputing and self.under_way.enter_forward(module) and self._calls:
            self._forget_uses()
        if self._calls and all(unit.holding.forwards for unit in units) and module is not self._model:
            self._enter(Call(module), units)  # a layer of a block that is under way: nothing to do
            return None
        outermost = not recomputing and (not self._calls or module is self._model)
        if outermost:
            self._begin_forward()
        cast = None
        if self._casts.concern(module, outermost=outermost):
            with theirs():  # gradients pass it
                cast = self._casts.of(args, kwargs, outermost=outermost)
        call = Call(module)
        call.note_inputs(*(cast or (args, kwargs)))
        self._enter(call, units)
        run_last(module)
        for unit in units:
            if unit.holding.forwards > 1:
                continue
            check_transform(unit, module)
            if recomputing:
                self._enter_backward(unit, runs_again=True)
            else:
                self._forward_order.note(unit)
                self._gatherer.acquire(unit)
                self._prefetch(self._forward_order)
        if user_records() and not recomputing:
            self._watch_saved(call, units)
        self._note_turn()
        return cast

    def _enter(self, call: Call, units: Sequence[Unit]) -> None:
        self._calls.append(call)
        for unit in units:
            unit.holding.take(Holder.FORWARD)

    def _watch_saved(self, call: Call, units: Sequence[Unit]) -> None:
        """Have what autograd saves of the parameters in this forward not keep their memory."""
        if any(other.saved_hooks for other in self._calls):
            return
        if self._activations is not None or any(unit.is_released_after_use for unit in self._units):
            call.saved_hooks = self._saved.hooks()
        if call.saved_hooks is not None:
            call.saved_hooks.__enter__()
        else:
            for unit in units:
                unit.holding.note_unseen_saves()

    def _gather_for_read(self, unit: Unit, module: nn.Module) -> None:
        """A forward reads a parameter whose own module does not run: gather it until that forward is over."""
        if not self._calls or unit.holding.is_held:
            return
        check_transform(unit, module)
        if in_backward():
            self._bring(unit)
            return
        self._hold_for(self._calls[-1], unit)

    def watch_saved(self) -> AbstractContextManager[Any]:
        """See what autograd saves of parameters that are shown outside of a forward."""
        return (self._saved.hooks() if user_records() else None) or nullcontext()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._calls or self._calls[-1].module is not module:
            return  # another hook failed before ours had its turn
        call = self._calls.pop()
        if call.saved_hooks is not None:
            call.saved_hooks.__exit__()
        finished = []
        for unit in call.reads:
            unit.holding.drop(Holder.FORWARD)
            self._gatherer.release(unit)
        for unit in self._anchors.get(module, ()):
            unit.holding.drop(Holder.FORWARD)
            if not unit.holding.forwards:
                finished.append(unit)
        if self._calls and not finished:
            return
        recomputing = in_backward()
        if finished:
            keep = self._watch_outputs(call, finished, output, args, kwargs)
            self._hand_on(finished, output)
            if not (keep or recomputing):  # else its backward comes next, and releases it
                for unit in finished:
                    self._gatherer.release(unit)
        if not (self._calls or recomputing):
            self._end_forward(complete=output is not None)
            self.under_way.leave_forward()
        self._note_turn()

    def _hand_on(self, units: Sequence[Unit], output: Any) -> None:
        """Whoever called a module that returns parameters of its own goes on to use them."""
        releasable = [unit for unit in units if unit.is_released_after_use]
        if not releasable:
            return
        returned = {self._gatherer.owner_of(tensor) for tensor in tensors_of(output)}
        for unit in releasable:
            if unit in returned and self._calls:
                self._hold_for(self._calls[-1], unit)
            elif unit in returned:
                unit.holding.hand_to_caller()
                if user_records():
                    unit.holding.take(Holder.UNANNOUNCED)

    def _hold_for(self, call: Call, unit: Unit) -> None:
        """Keep a unit gathered until a forward is over that is not one of its own."""
        call.reads.append(unit)
        unit.holding.take(Holder.FORWARD)
        self._gatherer.acquire(unit)
        if user_records() and not any(call.saved_hooks for call in self._calls):
            unit.holding.take(Holder.UNANNOUNCED)  # nobody sees what autograd saves of it

    def _watch_outputs(
        self, call: Call, units: list[Unit], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Gather the units again when a gradient reaches what their forward made. Returns: keep them instead."""
        if not user_records():
            return False
        made, complete = call.made(output, args, kwargs)
        for_saved = in_backward() and _inside_a_node()  # its first run was noted
        if made:
            use = Use(units) if for_saved else self._uses.note(units)
            for tensor in made:
                watch_first(tensor, crossing(partial(self._before_backward, use)))
        elif complete and output is not None and not for_saved:
            self._note_silent(units)
        if not complete:
            for unit in units:
                unit.holding.take(Holder.UNANNOUNCED)
            return True  # its backward may come unannounced
        return bool(made) and call.module is self._model and not in_backward()  # backward starts with it

    def _note_silent(self, units: Sequence[Unit]) -> None:
        """A forward made nothing with a backward on this rank. On another rank it may have."""
        if not self._reducer.has_peers:
            return
        if in_backward():  # of a reentrant checkpoint: its turn is now
            for unit in units:
                self._reducer.expect(unit)
        else:
            self._uses.note_silent([unit for unit in units if unit.wants_gradient])

    def _begin_forward(self) -> None:
        self._membership.check()
        if self.backward_open:
            self.abandon_backward()
        self._gathers = any(not unit.resident or unit.layout.shards > 1 for unit in self._units)  # homes may have moved
        self._forward_order.start()
        if self._activations is not None and user_records():
            self._activations.begin()

    def _end_forward(self, *, complete: bool) -> None:
        if self._activations is not None:
            self._activations.end()
        if complete:
            self._forward_order.finish()
            if not self._backward_order.was_observed:
                self._backward_order.replace(self._forward_order.learned[::-1])
        self._gatherer.drop_unused()

    def _clean_up(self) -> None:
        """What is no Exception ended a forward, such as an interrupt, or anything a backward."""
        self._forget_uses()
        if self.backward_open:
            self.abandon_backward()

    def _forget_uses(self) -> None:
        for call in self._calls[::-1]:
            if call.saved_hooks is not None and self._saved.are_innermost():
                call.saved_hooks.__exit__()
        self._calls.clear()
        if self._activations is not None:
            self._activations.end()
        for anchor in self._hooked:
            anchor.entered = 0
        self._gatherer.drop_unused()
        for unit in self._units:
            unit.holding.lose_forwards()
            self._gatherer.release(unit)

    # Backward

    def _before_backward(self, use: Use, grad: Tensor) -> Tensor:
        if self._removed:
            raise EngineError(
                f"backward() through a graph from before close(): the parameters of unit '{use.units[0].name}' that it "
                "reads are gone. Call backward before close(), or run the forward again."
            )
        self._pass_by(self._uses.reach(use))
        for unit in use.units:
            self._enter_backward(unit)
            self._expect(unit)
            if user_records():  # create_graph
                with theirs():
                    grad = unit.recorded.mark(grad)
        return grad

    def _bring(self, unit: Unit) -> None:
        """Backward reads the unit's parameters, whether it was announced or not."""
        if unit.holding.backwards or unit.holding.unannounced:
            return  # it is there
        if in_backward():
            self._open_backward()  # first: what ends without a word is looked for where one is open
        unit.holding.take(Holder.UNANNOUNCED)
        self._gatherer.acquire(unit)

    def _pass_by(self, silent: Sequence[Sequence[Unit]]) -> None:
        """Backward comes to these units on other ranks, now: gather and reduce with them."""
        for units in silent:
            for unit in units:
                self._enter_backward(unit)
                self._expect(unit)

    def _expect(self, unit: Unit) -> None:
        """Backward has come to the unit on every rank, and to its last forward: it will be reduced."""
        if self._uses.is_last(unit):
            self._reducer.expect(unit)

    def _enter_backward(self, unit: Unit, *, runs_again: bool = False) -> None:
        """Backward goes on in this unit, or its forward runs again because backward will."""
        if self._updates is not None:
            self._updates.check(unit)
        self._open_backward()
        over = [other for other in self._active if not other.shares_forward(unit)]
        if runs_again and _inside_a_node():  # which computes with what is active, and goes on afterwards
            over = [other for other in over if other in self._run_again]
        for other in over:
            self._leave_backward(other)
        if not runs_again:
            self._run_again.discard(unit)
        if unit in self._active:
            return
        if runs_again:
            self._run_again.add(unit)
        self._active.append(unit)
        unit.holding.take(Holder.BACKWARD)
        self._backward_order.note(unit)
        self._gatherer.acquire(unit)
        self._prefetch(self._backward_order)
        self._note_turn()

    def _open_backward(self) -> None:
        """A backward has begun: its end is to be seen."""
        if self.backward_open:
            self.under_way.join_backward()
            return
        self._gradient_scale.check_not_clipped()
        if self._gradient_scale.loss is not None and not self.loss_is_scaled:
            raise EngineError(
                "loss.backward() was called, and fp16 needs a scaled loss. Use optimizer.backward(loss), without "
                "a GradScaler."
            )
        self.under_way.enter_backward()
        self.backward_open = True
        self._backward_order.start()
        Variable._execution_engine.queue_callback(crossing(self._end_backward))

    def _prefetch(self, order: Order) -> None:
        if self._gathers:
            self._gatherer.prefetch(order.upcoming())

    def _leave_backward(self, unit: Unit) -> None:
        self._active.remove(unit)
        unit.holding.drop(Holder.BACKWARD)
        self._run_again.discard(unit)
        self._settle(unit)
        self._gatherer.release(unit)

    def _settle(self, unit: Unit) -> None:
        """Send the gradient home. Once every parameter has its own, no other will come."""
        self._reducer.flush(unit)
        if self._updates is None or self._reducer.accumulates or unit.holding.is_held:
            return
        if len(self._arrived.get(unit, ())) == len(unit.layout.slots):
            del self._arrived[unit]
            self._reducer.tell_host(unit)
            self._updates.begin(unit)
            if unit.resident or unit.spec.persistent:  # else it is released anyway
                self._gatherer.outdate(unit)

    def _take_gradient(self, unit: Unit, index: int, _: nn.Parameter) -> None:
        grad = unit.parameters[index].take_gradient()
        if not (unit.resident or unit.holding.used):
            raise EngineError(
                f"Parameter '{unit.spec.names[index]}' got a gradient, and no forward of {unit.label} ever ran: its "
                "values were not there when they were read (as NaN). Call the module itself, not its parts, its "
                "forward() or its weights alone; or choose units whose forward reads them, or read them inside "
                "gathered()."
            )
        if not self.backward_open:  # no watched output led here: the end of backward must still be seen
            self._enter_backward(unit)
        if self._updates is not None:
            self._updates.check(unit)
            self._arrived.setdefault(unit, set()).add(index)
        self._reducer.add(unit, index, grad)

    def _end_backward(self) -> None:
        self._pass_by(self._uses.end())
        for unit in self._units:
            unit.holding.end_backward()
            self._settle(unit)
        self._backward_order.finish()
        if not user_records():
            for unit in self._units:
                unit.recorded.end_unmarked()
        self._close_backward()

    def _close_backward(self) -> None:
        self.backward_open = False
        self._active.clear()
        self._run_again.clear()
        self._arrived.clear()
        self._uses.clear()
        for unit in self._units:
            unit.holding.end_backward()
            self._gatherer.release(unit)
            unit.holding.forget_unseen_saves()
        self._gatherer.drop_unused()
        self._note_turn()
        self.under_way.leave_backward()  # last: another thread's forward begins now

    def _note_turn(self) -> None:
        """Tell a trace what compute turns to: the innermost unit's backward or forward."""
        if self._streams.recorder is None:
            return
        units = self._active[-1:] or [u for call in self._calls[::-1] for u in self._anchors.get(call.module, ())][:1]
        verb = "backward" if self._active else "forward"
        self._streams.recorder.turn_to(Label(verb, units[0].name) if units else NO_LABEL)


def _inside_a_node() -> bool:
    """Whether autograd is in the middle of a node, which reads saved tensors that a forward makes again.

    The node of a reentrant checkpoint reads none: it only runs a forward and the backward of that.
    """
    return type(torch._C._current_autograd_node()).__name__ != "CheckpointFunctionBackward"


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None
