"""Forward of a unit: gathered before, released after."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.utils.hooks import RemovableHandle

from penstock.engine.forward_backward.backward import Backward, inside_a_node
from penstock.engine.forward_backward.casts import InputCasts, Inputs, LayerCast, all_fit, fits
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.order import (
    ActivePasses,
    ForwardCall,
    PendingBackward,
    look_into,
    watch_first,
)
from penstock.engine.forward_backward.saved_tensors import ActivationOffload, SavedTensors
from penstock.engine.step.context import EngineContext
from penstock.engine.step.owner_thread import UnderWay, in_backward
from penstock.engine.unit.dtensor import own_elements
from penstock.engine.unit.unit import Holder, Membership, Unit
from penstock.errors import EngineError
from penstock.runtime.modes import user_records

# ----------------------------------------------------------------------------------------------------------------------
# A module that the engine is told of, whether Python runs it or a compiler has traced it.
#
# `torch.compile` traces hooks into the graph of the code that calls a module. The border of a unit breaks the graph:
# the engine runs there, between two graphs, at every call. Inside of a unit that is gathered it has nothing to do, so
# modules there leave no trace and a unit is one graph. The compiler guards what that was decided by.
#
# What Python runs there is spared the way to the engine as well: most of a model's modules are layers inside of a unit.
# ----------------------------------------------------------------------------------------------------------------------


#: The number of our hooks in every module. Torch numbers hooks through all modules, and compilers guard the numbers:
#: each of many equal blocks would be compiled anew.
HOOK_ID = -1


def never_compile(*functions: Callable[..., Any]) -> None:
    """Have functions be traced into what calls them, and never be compiled by themselves.

    A call from Python beside compiled code would be, in as many kinds as there are values that it looks at, until torch
    reaches its limit of compilations.
    """
    for function in functions:
        torch._dynamo.eval_frame.skip_code(function.__code__)


@dataclass(eq=False)
class ModuleHooks:
    """The forward hooks of one module.

    Attributes:
        units: the units whose parameters its forward needs.
        always: whether it begins a forward of the model, also inside of another one.
        before, after: what the engine does then. They are not to be traced.
        passes: whether a forward that Python runs begins where the engine has nothing to do.
        cast: casts inputs that the module would refuse; it may be traced.
        entered: how many of its forwards are under way that the engine was told of; those of `always` are not counted.
    """

    units: Sequence[Unit]
    always: bool
    before: Callable[..., Inputs | None]
    after: Callable[..., None]
    passes: Callable[[nn.Module, Sequence[Unit]], bool]
    cast: LayerCast | None
    entered: int = 0

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks: before those that there are, and behind them."""
        never_compile(ModuleHooks.on_call, ModuleHooks.on_return, LayerCast.__call__, all_fit, fits)
        before = module.register_forward_pre_hook(self.on_call, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(self.on_return, with_kwargs=True, always_call=True)
        for handle in (before, after):
            _renumber(handle)
        module._forward_pre_hooks.move_to_end(HOOK_ID, last=False)  # type: ignore[attr-defined]
        return [before, after]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither pickled nor copied: a copy of hooks would gather and release the parameters of this model.

        Modules are copied without them (`engine/forward_backward/guards.py`), unless their class copies itself.
        """
        raise EngineError(
            "The hooks of a prepared model cannot be copied or pickled. Copy the model before prepare(), or fill a "
            "second one from state_dict() inside optimizer.gathered(); to keep it, use optimizer.save()."
        )

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Tell the engine that the module's forward begins; return its inputs where they were cast."""
        cast = None if self.cast is None else self.cast(module, args, kwargs)
        if cast is not None:
            args, kwargs = cast
        if not self.always:
            # Not where it was told of an outer forward of the same module: `after` takes the inner one's end for its.
            if not self.entered:
                if not torch.compiler.is_dynamo_compiling():
                    passed = self.passes(module, self.units)
                else:
                    passed = True
                    for unit in self.units:
                        passed = passed and unit.holding.forwards > 0
                if passed:
                    return cast
            self.entered += 1
        return self.before(module, args, kwargs) or cast

    def on_return(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Tell the engine that the module's forward is over, if it was told of the beginning."""
        if not self.always:
            if not self.entered:
                return
            self.entered -= 1
        self.after(module, args, kwargs, output)


def run_last(module: nn.Module) -> None:
    """Move our forward hook behind those registered since: they see the module's parameters too."""
    hooks = module._forward_hooks
    if next(reversed(hooks)) != HOOK_ID:
        hooks.move_to_end(HOOK_ID)  # type: ignore[attr-defined]


def _renumber(handle: RemovableHandle) -> None:
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[HOOK_ID] = hooks.pop(handle.id)
    handle.id = HOOK_ID


# ----------------------------------------------------------------------------------------------------------------------
# Transforms of `torch.func`, which keep weights where nobody outside can see them.
# ----------------------------------------------------------------------------------------------------------------------


_DIFFERENTIATE = (TransformType.Grad, TransformType.Jvp)


def check_transform(unit: Unit, module: nn.Module) -> None:
    """Refuse to be differentiated by a transform where parameters do not stay: it takes no saved-tensor hooks.

    Raises:
        EngineError: names the unit and the module.
    """
    levels = get_interpreter_stack()
    if not (levels and unit.is_released_after_use and any(level.key() in _DIFFERENTIATE for level in levels)):
        return
    raise EngineError(
        f"{type(module).__name__} is called inside a differentiating transform of torch.func (grad, vjp, jacrev, "
        f"hessian, jvp), and the parameters of {unit.label} are released after use. Use torch.autograd.grad, or keep "
        "parameters where compute reads them: Placement(params='device') at stage 2 or below."
    )


# ----------------------------------------------------------------------------------------------------------------------
# Forward: the units of a module are gathered before it runs, and released after it.
#
# Forward of an anchor: gather its units -> compute -> release them. A forward that runs again in backward (activation
# checkpointing) leaves its units to the backward that follows.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Forward:
    """The forwards of a model's modules.

    Attributes:
        gatherer: makes units usable, and gives their memory back.
        backward: takes over units whose forward runs again in it.
        passes: knows what compute is doing, and gathers units and those that are expected next.
        under_way: refuses other threads meanwhile.
        casts: knows which floating-point inputs are cast.
        activations: takes what forward saves; `None` leaves it where it is.
        membership: the modules of the parameters, looked at when a forward of the model begins.
        anchors: the hooks that tell of each module.
        owners: the unit of each parameter.
    """

    context: EngineContext
    gatherer: Gatherer
    backward: Backward
    passes: ActivePasses
    under_way: UnderWay
    casts: InputCasts
    activations: ActivationOffload | None

    def __post_init__(self) -> None:
        self._calls = self.passes.calls
        self._releases = True  # some units are released after their use
        self.membership = Membership(self.context.model, self.context.units)
        self.anchors: dict[nn.Module, ModuleHooks] = {}
        self.owners = {parameter.tensor: unit for unit in self.context.units for parameter in unit.parameters}
        self._saved = SavedTensors(self.gatherer.owner_of, self.owners, self.backward.bring, self.activations)

    def watch_saved(self) -> AbstractContextManager[Any]:
        """See what autograd saves of parameters that are shown outside of a forward."""
        return (self._saved.hooks() if user_records() else None) or nullcontext()

    def has_nothing_to_do(self, module: nn.Module, units: Sequence[Unit]) -> bool:
        """Whether a forward begins where there is nothing to do, so that it need not be told. On the user's side.

        Those of layers do, inside of a forward that holds their units. What has parts is told always: it may read
        parameters of parts that do not run, whose units are then held until its end and no longer.
        """
        if module._modules or not self._calls:
            return False
        for unit in units:
            if not unit.holding.forwards:
                return False
        # As in `before`: those of other threads are refused, and calls may be left of a forward that was lost.
        return in_backward() or self.under_way.goes_on_here()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Gather what a module needs before it runs; return its inputs where they were cast."""
        units = self.passes.anchors.get(module, ())
        recomputing = in_backward()
        # Refused beside a forward of another thread, which would release what this one computes with.
        if not recomputing and self.under_way.enter("forward"):
            if self._calls:
                self.lose()  # a new forward, and calls are left: the last one has ended without a word
            # Whoever lost it has forgotten all that it was told of, and this one with them: its end would do nothing.
            if (anchor := self.anchors.get(module)) is not None:
                anchor.entered = anchor.entered or 1
        if self._calls and all(unit.holding.forwards for unit in units) and module is not self.context.model:
            self._enter(ForwardCall(module), units)  # a layer of a block that is under way: nothing to do
            return None
        outermost = not recomputing and (not self._calls or module is self.context.model)
        if outermost:
            self._begin()
        cast = self.casts.of_call(module, (args, kwargs), outermost=outermost)
        call = ForwardCall(module)
        call.note_inputs(*(cast or (args, kwargs)))
        self._enter(call, units)
        run_last(module)  # hooks that were registered meanwhile read parameters, which ours releases
        for unit in units:
            if unit.holding.forwards > 1:
                continue  # an outer call has gathered it, and holds it longer
            check_transform(unit, module)
            if recomputing:  # held by the backward that follows: released in between, it would be gathered twice
                self.backward.enter(unit, runs_again=True)
            else:
                self.passes.use(unit, self.passes.forward)
        if user_records() and not recomputing:
            self._watch_saved(call, units)
        self.passes.note()
        return cast

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Release what a module needed after it has run, or has raised an error; `output` is `None` then."""
        recomputing = in_backward()
        if not self._calls or self._calls[-1].module is not module:
            return  # another hook failed before ours had its turn
        if not (recomputing or self.under_way.goes_on_here()):
            return  # `before` has refused it, beside another thread's forward of the same module
        call = self._calls.pop()
        if call.saved_hooks is not None:
            call.saved_hooks.__exit__()  # before anything below can fail: they would stay on the thread
        finished = []
        for unit in call.reads:
            unit.holding.drop(Holder.FORWARD)
            self.gatherer.release(unit)
        for unit in self.passes.anchors.get(module, ()):
            unit.holding.drop(Holder.FORWARD)
            if not unit.holding.forwards:
                finished.append(unit)
        if self._calls and not finished:
            return
        if finished:
            # Before the release: what announces their backward, or holds them for one that nothing announces.
            keep = self._watch_outputs(call, finished, output, args, kwargs)
            self._hand_on(finished, output)
            if not (keep or recomputing):  # else its backward comes next, and releases it
                for unit in finished:
                    self.gatherer.release(unit)
        if not (self._calls or recomputing):
            self._end(complete=output is not None)
            self.passes.note()  # before another thread's forward may change what there is to note
            self.under_way.leave("forward")  # after the releases: another thread's forward may begin now
        else:
            self.passes.note()

    def gather_for_read(self, unit: Unit) -> None:
        """Gather a unit that a forward reads though its own module does not run, until that forward is over."""
        if not self._calls or unit.holding.is_held:
            return
        # Another thread comes by at another time on each rank, and what it reads nobody would hold for it.
        if not (in_backward() or self.under_way.goes_on_here()):
            return
        check_transform(unit, self._calls[-1].module)
        if in_backward():
            self.backward.bring(unit)
            return
        self._hold_for(self._calls[-1], unit)

    def lose(self) -> None:
        """Let go of forwards that have ended without a word, by an interrupt."""
        for call in self._calls[::-1]:
            # Others that were entered since are on top of them: to exit ours would take theirs off.
            if call.saved_hooks is not None and self._saved.are_innermost():
                call.saved_hooks.__exit__()
        self._calls.clear()
        for anchor in self.anchors.values():
            anchor.entered = 0  # they were told of the beginning alone
        self._end(complete=False)
        for unit in self.context.units:
            unit.holding.lose_forwards()  # else their counts would keep the units gathered for ever
            self.gatherer.release(unit)

    def _begin(self) -> None:
        """Begin the outermost forward, after whatever a backward that never ended has left."""
        self.membership.check()
        if self.backward.is_open:
            self.backward.abandon()  # it failed, and autograd tells nobody: its units are held still
        self.backward.handles.look()
        self.passes.begin_forward()
        # Not before there is a gather: one rank alone may run a forward that needs no other, as in a `gathered` block.
        self.gatherer.announce = partial(self.context.ranks.begin_forward, recorded=user_records())
        self._releases = any(unit.is_released_after_use for unit in self.context.units)  # homes may have moved
        if self.activations is not None and user_records():
            self.activations.begin()

    def _end(self, *, complete: bool) -> None:
        if self.activations is not None:
            self.activations.end()
        self.gatherer.announce = None
        if complete:
            self.passes.forward.finish()
        self.gatherer.drop_unused()  # gathered ahead for a unit that did not come

    def _enter(self, call: ForwardCall, units: Sequence[Unit]) -> None:
        self._calls.append(call)
        for unit in units:
            unit.holding.take(Holder.FORWARD)

    def _watch_saved(self, call: ForwardCall, units: Sequence[Unit]) -> None:
        """Have what autograd saves of the parameters in this forward not keep their memory."""
        if any(other.saved_hooks for other in self._calls):
            return
        if self.activations is not None or self._releases:
            call.saved_hooks = self._saved.hooks()
        if call.saved_hooks is not None:
            call.saved_hooks.__enter__()
        else:
            for unit in units:
                unit.holding.note_unseen_saves()

    def _watch_outputs(
        self, call: ForwardCall, units: list[Unit], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Have units gathered again when a gradient reaches what their forward made; return whether to keep them."""
        if not user_records():
            return False
        made, complete = call.made(output, args, kwargs)
        for_saved = in_backward() and inside_a_node()  # its first run was noted
        if made:
            use = PendingBackward(units) if for_saved else self.backward.uses.note(units)
            for tensor in made:
                # Runs before the node that made the tensor, whose backward reads the weights: later, they would be NaN.
                watch_first(tensor, partial(self.backward.reach, use))
        elif complete and output is not None and not for_saved:
            self.backward.note_silent(units)
        if not complete:
            for unit in units:
                unit.holding.take(Holder.UNANNOUNCED)
            return True  # its backward may come unannounced
        return bool(made) and call.module is self.context.model and not in_backward()  # backward starts with it

    def _hand_on(self, units: Sequence[Unit], output: Any) -> None:
        """Leave parameters that a module returns to its caller, who goes on to use them."""
        releasable = [unit for unit in units if unit.is_released_after_use]
        if not releasable:
            return
        returned = {self.gatherer.owner_of(own_elements(tensor)) for tensor in look_into(output).tensors.values()}
        for unit in releasable:
            if unit in returned and self._calls:
                self._hold_for(self._calls[-1], unit)
            elif unit in returned:
                unit.holding.hand_to_caller()
                if user_records():
                    unit.holding.take(Holder.UNANNOUNCED)

    def _hold_for(self, call: ForwardCall, unit: Unit) -> None:
        """Keep a unit gathered until a forward is over that is not one of its own."""
        call.reads.append(unit)
        unit.holding.take(Holder.FORWARD)
        self.gatherer.acquire(unit)
        if user_records() and not any(call.saved_hooks for call in self._calls):
            unit.holding.take(Holder.UNANNOUNCED)  # nobody sees what autograd saves of it
