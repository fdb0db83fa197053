"""The policy of a step: how the loss is scaled, when a step is skipped, what an update clips to."""

import math

import torch
from torch import Tensor

from penstock.engine.parts import Passes, Updates
from penstock.engine.updates.rig import Rig
from penstock.engine.updates.step import StepResult
from penstock.errors import no_gradient
from penstock.machine.growth import Growth


class StepPolicy:
    """What `backward` and `step` of the optimizer do, once nothing stands against it.

    Arguments:
        rig: what every part of the engine works with.
        passes: what gathers, reduces and runs backward.
        updates: what decides on steps and makes them.
        max_grad_norm: the norm that every step clips to; `None` for none.
        waits: whether resident parameters are up to date when a step returns.
    """

    def __init__(
        self,
        rig: Rig,
        passes: Passes,
        updates: Updates,
        *,
        max_grad_norm: float | None,
        waits: bool,
    ) -> None:
        self._units = rig.units
        self._scale = rig.gradient_scale
        self._gatherer = passes.gatherer
        self._backward = passes.hooks.backward
        self._stepper = updates.stepper
        self._skips = updates.skips
        self._max_grad_norm = max_grad_norm
        self._waits = waits
        # A device has its own allocator, and the host of one makes nothing in forward and backward.
        self._growth = Growth(rig.streams.return_free_memory) if rig.streams.computes_on_host else None

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run the backward of a loss, which is scaled first where there is a loss scale (fp16).

        Raises:
            EngineError: the loss does not require a gradient.
        """
        self._backward.handles.look()
        self._scale.check_not_clipped()  # before anything is dropped, as for a backward that fails
        scale = self._scale.loss_scale
        self._backward.loss_is_scaled = True
        try:
            if not loss.requires_grad:
                raise no_gradient()
            if scale != 1.0:
                with torch.enable_grad():
                    loss = loss.float() * scale  # in fp32: a loss in fp16 would overflow
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException:
            self._backward.abandon()
            raise
        finally:
            self._backward.loss_is_scaled = False

    def step(self) -> StepResult:
        """Update every parameter that has a gradient on any rank, or nothing where the norm is not finite. Collective.

        1. Measure the gradient over ranks, and decide.
        2. What is gathered is from before the step, and so are graphs: take note, before the first value changes.
        3. Update, and show what compute reads where it rests.
        """
        measure = self._stepper.measure()
        if not math.isfinite(measure.grad_norm):
            self._stepper.skip()
            self._skips.step_skipped(measure.flawed)
            return StepResult(float("nan"), skipped=True, loss_scale=self._scale.loss_scale)
        updated = {unit: slots for unit, slots in measure.present.items() if slots}
        # Before the first write: what is gathered has the values of before, and whoever uses a unit from here on has to
        # gather it again, after its update.
        for unit in updated:  # of the others graphs may still go backward
            self._gatherer.outdate(unit)
        for unit, slots in updated.items():
            unit.count_writes(slots)
        self._stepper.update(measure, self._max_grad_norm)
        # After the homes know of the updates: what is shown waits for them, or stays hidden until they are over.
        self._gatherer.show_resident(self._units, wait=self._waits)
        self._skips.step_made()
        if self._growth is not None:  # now, when no activations are held
            self._growth.look()
        return StepResult(measure.grad_norm, skipped=False, loss_scale=self._scale.loss_scale)
