"""Forward: gather the units of a module before it runs, and release them after it."""

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
from penstock.engine.step.owner_thread import OwnerThread, in_backward
from penstock.engine.unit.dtensor import own_elements
from penstock.engine.unit.unit import Holder, Membership, Unit
from penstock.errors import EngineError
from penstock.runtime.modes import user_records

# ----------------------------------------------------------------------------------------------------------------------
# The forward hooks of a module, which Python runs or a compiler traces.
#
# `torch.compile` traces hooks into the graph of the code that calls a module. At the beginning and at the end of a unit
# the graph breaks, and the engine runs between two graphs at every call. Inside a gathered unit the engine has nothing
# to do: the hooks of modules there add nothing to the graph, and a unit is one graph. The compiler guards the values
# that this depends on.
#
# If Python runs such a module, its hooks do not call the engine either: most modules of a model are layers in a unit.
# ----------------------------------------------------------------------------------------------------------------------


#: The id of our hooks in every module. Torch counts ids over all modules, and compilers guard them: with different ids
#: each of many equal blocks would be compiled anew.
HOOK_ID = -1


def never_compile(*functions: Callable[..., Any], below: bool = False) -> None:
    """Have a compiler trace functions as part of their callers, and never compile them by themselves.

    A call from Python beside compiled code would otherwise be compiled once for each set of values that it reads, until
    torch reaches its limit of recompilations.

    Arguments:
        functions: in Python.
        below: do not compile what they call either.
    """
    types: Any = torch._dynamo.types
    skip = types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(skip, skip if below else types.FrameAction.DEFAULT)
    for function in functions:
        torch._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]


@dataclass(eq=False)
class ModuleHooks:
    """The forward hooks of one module.

    Attributes:
        units: the units whose parameters its forward needs.
        always: True for the model itself: the engine is called for each of its forwards.
        before, after: the calls of the engine. A compiler does not trace them.
        passes: returns True if the engine has nothing to do for a forward that Python runs.
        cast: casts inputs that the module would refuse. A compiler may trace it.
        entered: how many forwards are under way for which `before` was called; not counted with `always`.
    """

    units: Sequence[Unit]
    always: bool
    before: Callable[..., Inputs | None]
    after: Callable[..., None]
    passes: Callable[[nn.Module, Sequence[Unit]], bool]
    cast: LayerCast | None
    entered: int = 0

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks: the first one before all that exist, and the last one after all that exist."""
        never_compile(ModuleHooks.on_call, ModuleHooks.on_return, LayerCast.__call__, all_fit, fits)
        before = module.register_forward_pre_hook(self.on_call, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(self.on_return, with_kwargs=True, always_call=True)
        for handle in (before, after):
            _renumber(handle)
        module._forward_pre_hooks.move_to_end(HOOK_ID, last=False)  # type: ignore[attr-defined]
        return [before, after]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling and copying: a copy of the hooks would gather and release the parameters of this model.

        Modules are copied without them (`engine/forward_backward/guards.py`), unless their class copies itself.
        """
        raise EngineError(
            "The hooks of a prepared model cannot be copied or pickled. Copy the model before prepare(), or fill a "
            "second one from state_dict() inside optimizer.gathered(); to keep it, use optimizer.save()."
        )

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Call the engine before the module's forward; return the inputs if they were cast."""
        cast = None if self.cast is None else self.cast(module, args, kwargs)
        if cast is not None:
            args, kwargs = cast
        if not self.always:
            # Inside a forward of the same module the engine is always called, so that `after` finds the right one.
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
        """Call the engine after the module's forward, if it was called before it."""
        if not self.always:
            if not self.entered:
                return
            self.entered -= 1
        self.after(module, args, kwargs, output)


def run_last(module: nn.Module) -> None:
    """Move our forward hook behind hooks that were registered later: those may read the module's parameters."""
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
# Transforms of `torch.func`, which keep weights where no saved-tensor hook sees them.
# ----------------------------------------------------------------------------------------------------------------------


_DIFFERENTIATE = (TransformType.Grad, TransformType.Jvp)


def check_transform(unit: Unit, module: nn.Module) -> None:
    """Refuse differentiation by a transform if the unit is released after use: transforms take no saved-tensor hooks.

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
# Forward of a module: gather its units -> compute -> release them. A forward that runs again in backward (activation
# checkpointing) leaves its units to the backward that follows.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Forward:
    """The forwards of a model's modules.

    Attributes:
        gatherer: gathers and releases units.
        backward: holds units whose forward runs again in backward.
        passes: the units that compute works on, and the order in which units are used.
        owner_thread: refuses other threads during a forward.
        casts: casts floating-point inputs.
        activations: offloads saved tensors; `None` leaves them on the device.
        membership: the parameters that modules hold, checked when a forward of the model begins.
        hooked_modules: the hooks of each module.
        owners: the unit of each parameter.
    """

    context: EngineContext
    gatherer: Gatherer
    backward: Backward
    passes: ActivePasses
    owner_thread: OwnerThread
    casts: InputCasts
    activations: ActivationOffload | None

    def __post_init__(self) -> None:
        self._calls = self.passes.calls
        self._releases = True  # some units are released after their use
        self.membership = Membership(self.context.model, self.context.units)
        self.hooked_modules: dict[nn.Module, ModuleHooks] = {}
        self.owners = {parameter.tensor: unit for unit in self.context.units for parameter in unit.parameters}
        self._saved = SavedTensors(self.gatherer.owner_of, self.owners, self.backward.bring, self.activations)

    def watch_saved(self) -> AbstractContextManager[Any]:
        """Return the saved-tensor hooks for a `gathered` block, in which parameters are read outside a forward."""
        return (self._saved.hooks() if user_records() else None) or nullcontext()

    def has_nothing_to_do(self, module: nn.Module, units: Sequence[Unit]) -> bool:
        """Return True if the engine has nothing to do for a forward that begins. It runs in user mode.

        That is so for a layer inside a forward that holds its units. Not for a module with submodules: it may read
        parameters of submodules that do not run, whose units are then held until its end.
        """
        if module._modules or not self._calls:
            return False
        for unit in units:
            if not unit.holding.forwards:
                return False
        # As in `before`: other threads are refused, and `_calls` may be of a forward that an interrupt ended.
        return in_backward() or self.owner_thread.goes_on_here()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Gather the units of a module before it runs; return its inputs if they were cast."""
        units = self.passes.hooked_modules.get(module, ())
        recomputing = in_backward()
        # Raises an error beside another thread's forward, which would release the units that this one computes with.
        if not recomputing and self.owner_thread.enter("forward"):
            if self._calls:
                self.lose()  # a new forward, and calls are left: an interrupt ended the last one
            # Losing that forward has reset all counts, also that of this call, whose end would then do nothing.
            if (hooked_module := self.hooked_modules.get(module)) is not None:
                hooked_module.entered = hooked_module.entered or 1
        if self._calls and all(unit.holding.forwards for unit in units) and module is not self.context.model:
            self._enter(ForwardCall(module), units)  # a module inside a block that holds its units: nothing to do
            return None
        outermost = not recomputing and (not self._calls or module is self.context.model)
        if outermost:
            self._begin()
        cast = self.casts.of_call(module, (args, kwargs), outermost=outermost)
        call = ForwardCall(module)
        call.note_inputs(*(cast or (args, kwargs)))
        self._enter(call, units)
        run_last(module)  # hooks that were registered later may read parameters, which ours releases
        for unit in units:
            if unit.holding.forwards > 1:
                continue  # an outer call has gathered the unit, and holds it longer
            check_transform(unit, module)
            if recomputing:  # the backward that follows holds it: released in between, it would be gathered twice
                self.backward.enter(unit, runs_again=True)
            else:
                self.passes.use(unit, self.passes.forward)
        if user_records() and not recomputing:
            self._watch_saved(call, units)
        self.passes.note()
        return cast

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Release the units of a module after it has run, or has raised an error (`output` is `None` then)."""
        recomputing = in_backward()
        if not self._calls or self._calls[-1].module is not module:
            return  # another hook failed before ours ran
        if not (recomputing or self.owner_thread.goes_on_here()):
            return  # `before` has raised an error in this thread: another one runs the same module
        call = self._calls.pop()
        if call.saved_hooks is not None:
            call.saved_hooks.__exit__()  # before anything below can fail: the hooks would stay on this thread
        finished = []
        for unit in call.reads:
            unit.holding.drop(Holder.FORWARD)
            self.gatherer.release(unit)
        for unit in self.passes.hooked_modules.get(module, ()):
            unit.holding.drop(Holder.FORWARD)
            if not unit.holding.forwards:
                finished.append(unit)
        if self._calls and not finished:
            return
        if finished:
            # Before the release: it announces their backward, or holds the units for a backward that is not announced.
            keep = self._watch_outputs(call, finished, output, args, kwargs)
            self._hand_on(finished, output)
            if not (keep or recomputing):  # otherwise their backward comes next, and releases them
                for unit in finished:
                    self.gatherer.release(unit)
        if not (self._calls or recomputing):
            self._end(complete=output is not None)
            self.passes.note()  # before another thread's forward may begin
            self.owner_thread.leave("forward")  # after the releases: another thread's forward may begin from here on
        else:
            self.passes.note()

    def gather_for_read(self, unit: Unit) -> None:
        """Gather a unit whose parameter a forward reads while its own module does not run, until that forward ends."""
        if not self._calls or unit.holding.is_held:
            return
        # Not for another thread: it reads at a different point on each rank (ordering rule 4).
        if not (in_backward() or self.owner_thread.goes_on_here()):
            return
        check_transform(unit, self._calls[-1].module)
        if in_backward():
            self.backward.bring(unit)
            return
        self._hold_for(self._calls[-1], unit)

    def lose(self) -> None:
        """Drop the forwards that an interrupt ended."""
        for call in self._calls[::-1]:
            # Hooks that were entered later are on top of ours, and to exit ours would remove those.
            if call.saved_hooks is not None and self._saved.are_innermost():
                call.saved_hooks.__exit__()
        self._calls.clear()
        for hooked_module in self.hooked_modules.values():
            hooked_module.entered = 0  # their ends were never reported
        self._end(complete=False)
        for unit in self.context.units:
            # The counts would keep the units gathered for ever.
            unit.holding.drop_all(Holder.FORWARD, Holder.UNANNOUNCED)
            self.gatherer.release(unit)

    def _begin(self) -> None:
        """Begin the outermost forward, and drop a backward that never ended."""
        self.membership.check()
        if self.backward.is_open:
            self.backward.abandon()  # it failed, and autograd reports no failure: its units are still held
        self.backward.proxies.look()
        self.passes.begin_forward()
        # Ranks announce a forward at its first gather: in a `gathered` block one rank alone may run one.
        self.gatherer.announce = partial(self.context.ranks.begin_forward, recorded=user_records())
        self._releases = any(unit.is_released_after_use for unit in self.context.units)  # state may have moved
        if self.activations is not None and user_records():
            self.activations.begin()

    def _end(self, *, complete: bool) -> None:
        if self.activations is not None:
            self.activations.end()
        self.gatherer.announce = None
        if complete:
            self.passes.forward.finish()
        self.gatherer.drop_unused()  # gathers ahead for units that were not used

    def _enter(self, call: ForwardCall, units: Sequence[Unit]) -> None:
        self._calls.append(call)
        for unit in units:
            unit.holding.take(Holder.FORWARD)

    def _watch_saved(self, call: ForwardCall, units: Sequence[Unit]) -> None:
        """Enter saved-tensor hooks, so that tensors saved in this forward do not keep the units' memory."""
        if any(other.saved_hooks for other in self._calls):
            return
        if self.activations is not None or self._releases:
            call.saved_hooks = self._saved.hooks()
        if call.saved_hooks is not None:
            call.saved_hooks.__enter__()
        else:
            for unit in units:
                unit.holding.empty_views()

    def _watch_outputs(
        self, call: ForwardCall, units: list[Unit], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Watch the tensors that a forward made for gradients; return True if the units stay gathered for backward."""
        if not user_records():
            return False
        made, complete = call.made(output, args, kwargs)
        for_saved = in_backward() and inside_a_node()  # the first run of this forward was noted
        if made:
            use = PendingBackward(units) if for_saved else self.backward.uses.note(units)
            for tensor in made:
                # The hook runs before the node that made the tensor, whose backward reads the weights.
                watch_first(tensor, partial(self.backward.reach, use))
        elif complete and output is not None and not for_saved:
            self.backward.note_silent(units)
        if not complete:
            for unit in units:
                unit.holding.take(Holder.UNANNOUNCED)
            return True  # their backward may come unannounced
        return bool(made) and call.module is self.context.model and not in_backward()  # backward starts with them

    def _hand_on(self, units: Sequence[Unit], output: Any) -> None:
        """Keep parameters usable that a module returns to its caller."""
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
        """Keep a unit gathered until a forward of another module is over."""
        call.reads.append(unit)
        unit.holding.take(Holder.FORWARD)
        self.gatherer.acquire(unit)
        if user_records() and not any(call.saved_hooks for call in self._calls):
            unit.holding.take(Holder.UNANNOUNCED)  # no hook sees the views of it that autograd saves
