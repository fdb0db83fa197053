"""The hooks on a model, by which modules and autograd call the engine's forward and backward."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.forward_backward.backward import Backward
from penstock.engine.forward_backward.casts import InputCasts
from penstock.engine.forward_backward.forward import Forward, ModuleHooks, never_compile
from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.order import ActivePasses
from penstock.engine.forward_backward.saved_tensors import ActivationOffload, SavedTensors
from penstock.engine.gradients.proxy import GradientProxies
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.step.context import EngineContext
from penstock.engine.step.owner_thread import OwnerThread, in_backward
from penstock.engine.step.step import Stepper
from penstock.engine.unit.parameter import ReadWatch, weakly
from penstock.engine.unit.unit import Unit
from penstock.runtime.modes import engine_entry


class Hooks:
    """Connects a model to the engine's forward and backward.

    Arguments:
        gatherer: gathers and releases units.
        reducer: takes the gradients.
        casts: casts floating-point inputs.
        updates: begins updates during backward; `None` where updates wait for the step.
        activations: offloads saved tensors; `None` leaves them on the device.

    Attributes:
        owner_thread: the thread that runs the model. It refuses other threads.
        passes: the forwards and backwards under way, and the order in which units are used.
        proxies: the gradient proxies in `.grad` between backwards.
        read: gathers a unit whose parameters a forward reads.
    """

    def __init__(
        self,
        context: EngineContext,
        gatherer: Gatherer,
        reducer: Reducer,
        casts: InputCasts,
        updates: Stepper | None,
        activations: ActivationOffload | None,
    ) -> None:
        self._context = context
        self._activations = activations
        self.owner_thread = OwnerThread(self._clean_up)
        if activations is not None:
            activations.end_lost = self.owner_thread.end_lost
        hooked_modules: dict[nn.Module, tuple[Unit, ...]] = {}
        for unit in context.units:
            for hooked_module in unit.spec.hooked_modules:
                hooked_modules[hooked_module] = (*hooked_modules.get(hooked_module, ()), unit)
        self.passes = passes = ActivePasses(context, gatherer, hooked_modules)
        self.proxies = GradientProxies(context)
        self.backward = Backward(context, gatherer, reducer, passes, self.owner_thread, self.proxies, updates)
        self.forward = Forward(context, gatherer, self.backward, passes, self.owner_thread, casts, activations)
        self._handles: list[RemovableHandle] = []
        self._attach_to_modules(casts)
        self._attach_to_parameters()

    def _attach_to_modules(self, casts: InputCasts) -> None:
        untraced = partial(torch.compiler.disable, reason="A unit of Penstock is gathered or released between graphs.")
        before, after = untraced(engine_entry(self.forward.before)), untraced(engine_entry(self.forward.after))
        never_compile(Forward.has_nothing_to_do, in_backward, OwnerThread.goes_on_here, OwnerThread.is_over)
        # Torch before 2.13 calls these beside compiled code as well, and would compile all that they call.
        never_compile(SavedTensors._pack, SavedTensors._unpack, below=True)
        model, may_pass = self._context.model, self.forward.has_nothing_to_do
        self.read = untraced(engine_entry(self.forward.gather_for_read))
        owners = self.forward.owners

        def read(parameter: nn.Parameter) -> None:
            if parameter in owners:
                self.read(owners[parameter])

        for module in model.modules():
            watch = ReadWatch(module, read)
            for unit in {owners[p] for p in module.parameters(recurse=False) if p in owners}:
                unit.reads.append(watch)
            watch.update()
        for module, units in {model: (), **self.passes.hooked_modules}.items():
            hooked_module = ModuleHooks(units, module is model, before, after, may_pass, casts.of_layer(module))
            self._handles += hooked_module.attach(module)
            self.forward.hooked_modules[module] = hooked_module

    def _attach_to_parameters(self) -> None:
        for unit in self._context.units:
            for parameter in unit.parameters:
                take: Callable[[nn.Parameter], None]
                if unit.trained:
                    take = engine_entry(weakly(self.backward.take_gradient, unit, parameter.index))
                elif parameter.tensor.requires_grad:
                    take = engine_entry(_drop_gradient)
                else:
                    continue
                handle = parameter.tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def remove(self) -> None:
        """Remove every hook from the model."""
        self.forward.lose()  # forwards that an interrupt ended
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for unit in self._context.units:
            for watch in unit.reads:
                watch.end()
        self.backward.closed = True

    def release_memory(self) -> None:
        """Free memory, between steps, that the next forward can allocate again."""
        if self._activations is not None:
            self._activations.release_memory()

    def close(self) -> None:
        """Drop the memory of offloaded activations, which is freed with the store. Nothing is under way."""
        if self._activations is not None:
            self._activations.close()

    @property
    def in_forward(self) -> bool:
        """True while a forward of the model is under way."""
        return bool(self.passes.calls)

    def _clean_up(self) -> None:
        """Drop a forward that an interrupt ended, and a backward that ended with an exception."""
        self.forward.lose()
        if self.backward.is_open:
            self.backward.abandon()


def _drop_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None
