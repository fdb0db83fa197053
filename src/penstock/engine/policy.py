"""What an engine does with gradients: the policy of a step, and what a user does to them between backward and step."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.gradients.proxy import is_handle_of
from penstock.engine.gradients.reduce import Reducer
from penstock.engine.state.access import StateAccess
from penstock.engine.step.context import EngineContext, SkippedSteps
from penstock.engine.step.owner_thread import in_backward
from penstock.engine.step.step import Stepper, StepResult
from penstock.engine.unit.dtensor import is_divided
from penstock.engine.unit.parameter import UnitParameter
from penstock.errors import EngineError, no_gradient
from penstock.runtime.modes import engine_entry
from penstock.runtime.system import Growth

# ----------------------------------------------------------------------------------------------------------------------
# The policy of a step: how the loss is scaled, when a step is skipped, what an update clips to.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepPolicy:
    """What `backward` and `step` of the optimizer do, once nothing stands against it.

    Attributes:
        gatherer: forgets what it gathered before a step.
        hooks: run the backward of a loss.
        stepper: measures, decides and updates.
        skips: counts the steps that were skipped.
        max_grad_norm: the norm that every step clips to; `None` for none.
        waits: whether resident parameters are up to date when a step returns.
    """

    context: EngineContext
    gatherer: Gatherer
    hooks: Hooks
    stepper: Stepper
    skips: SkippedSteps
    max_grad_norm: float | None
    waits: bool

    def __post_init__(self) -> None:
        # A device has its own allocator, and the host of one makes nothing in forward and backward.
        streams = self.context.streams
        self._growth = Growth(streams.return_free_memory) if streams.computes_on_host else None

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run the backward of a loss, which is scaled first where there is a loss scale (fp16).

        Raises:
            EngineError: the loss does not require a gradient.
        """
        self.hooks.backward.check()  # before anything is dropped, as for a backward that fails
        scale = self.context.gradient_scale.loss_scale
        self.hooks.backward.loss_is_scaled = True
        try:
            if not loss.requires_grad:
                raise no_gradient()
            if scale != 1.0:
                with torch.enable_grad():
                    loss = loss.float() * scale  # in fp32: a loss in fp16 would overflow
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException:
            self.hooks.backward.abandon()
            raise
        finally:
            self.hooks.backward.loss_is_scaled = False

    def step(self) -> StepResult:
        """Update every parameter that has a gradient on any rank, or nothing where the norm is not finite. Collective.

        1. Measure the gradient over ranks, and decide.
        2. What is gathered is from before the step, and so are graphs: take note, before the first value changes.
        3. Update, and show what compute reads where it rests.
        """
        measure = self.stepper.measure()
        if not math.isfinite(measure.grad_norm):
            self.stepper.skip()
            self.skips.step_skipped(measure.flawed)
            return StepResult(float("nan"), skipped=True, loss_scale=self.context.gradient_scale.loss_scale)
        updated = {unit: slots for unit, slots in measure.present.items() if slots}
        # Before the first write: what is gathered has the values of before, and whoever uses a unit from here on has to
        # gather it again, after its update.
        for unit in updated:  # of the others graphs may still go backward
            self.gatherer.outdate(unit)
        for unit, slots in updated.items():
            unit.count_writes(slots)
        self.stepper.update(measure, self.max_grad_norm)
        # After the homes know of the updates: what is shown waits for them, or stays hidden until they are over.
        self.gatherer.show_resident(self.context.units, wait=self.waits)
        self.skips.step_made()
        if self._growth is not None:  # now, when no activations are held
            self._growth.look()
        return StepResult(measure.grad_norm, skipped=False, loss_scale=self.context.gradient_scale.loss_scale)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients between backward and step: their norms, what they are multiplied with, what people set and drop.
#
# People reach them in two ways that mean the same: methods of the optimizer, and `.grad` with torch's own functions
# (`gradients/proxy.py`). What is put into `.grad`, or taken out of it, tells nobody. It is found when somebody looks
# next: a forward or backward of the model, and every method that needs gradients.
# ----------------------------------------------------------------------------------------------------------------------


TOTAL_NORM = "the norm of gradients (torch.nn.utils.clip_grad_norm_, get_total_norm, parameter.grad.norm)"


class Gradients:
    """What is done to the gradients of an engine after backward.

    Arguments:
        context: what every part of the engine works with.
        hooks: put handles on.
        reducer: has what is reduced.
        stepper: measures gradients.
        access: reads and writes those of single parameters.
    """

    def __init__(
        self, context: EngineContext, hooks: Hooks, reducer: Reducer, stepper: Stepper, access: StateAccess
    ) -> None:
        self._context = context
        self._hooks = hooks
        self._reducer = reducer
        self._stepper = stepper
        self._access = access
        units = [unit for unit in context.units if unit.trained]
        self._parameters = {parameter: unit for unit in units for parameter in unit.parameters}
        self._by_tensor = {parameter.tensor: parameter for parameter in self._parameters}
        self._norms: dict[float, Mapping[UnitParameter, float]] = {}
        self._known_changes = -1  # of the reducer, of when `_norms` were taken
        self._finite = True  # all of them
        self._factors: dict[UnitParameter, float] = {}  # not applied yet
        self._by_hand: dict[str, object] = {}  # since the last `zero`
        hooks.handles.answers = self

    @property
    def by_hand(self) -> Mapping[str, object]:
        """What people have set, dropped or scaled: for ranks to compare, because each does it to its own shard."""
        return dict(sorted(self._by_hand.items()))

    def check_whole(self, verb: str) -> None:
        """Refuse to work on gradients that are not whole, or not all there; take over what people did to them.

        Arguments:
            verb: the method that was called, for messages.

        Raises:
            EngineError: says what is missing.
        """
        self._check_complete(verb)
        self.look()

    def _check_complete(self, verb: str) -> None:
        if in_backward() or self._hooks.in_forward:
            raise EngineError(
                f"{verb}() was called inside a forward or a backward. Call it after backward has returned."
            )
        if self._hooks.backward.is_open or self._hooks.backward.has_failed:
            raise EngineError(
                "The last backward did not finish, so its gradients are not whole. Drop them with zero_grad()."
            )
        if self._reducer.holds_back(self._context.units):
            raise EngineError(
                f"Gradients of no_sync micro-batches are not reduced yet. Run the last backward before {verb}() "
                "outside no_sync(), or drop them with zero_grad()."
            )

    def look(self) -> None:
        """Take over what people have put into `.grad`, taken out of it, and multiplied. Not collective.

        Raises:
            ConfigError: a value that no gradient can have.
            EngineError: a value that stands for the gradient of another parameter, or updates have begun.
        """
        if self._factors:
            self._apply_factors()
        dropped = []
        for parameter in self._touched():
            grad = parameter.tensor.grad
            if grad is None:
                dropped.append(parameter)
            elif is_handle_of(grad, parameter):
                self._hooks.handles.show(parameter)
            else:
                self.set(parameter.tensor, grad)
        if dropped:
            self.drop(dropped)

    def _touched(self) -> list[UnitParameter]:
        """List the parameters whose `.grad` is not what was left there: the handle, or nothing."""
        return [p for p in self._parameters if p.tensor.grad is not (p.handle if p.shows_gradient else None)]

    def zero(self) -> None:
        """Forget all gradients, also those that somebody has set. A new loss scale counts from here on."""
        self._hooks.backward.has_failed = False
        self._reducer.zero(self._context.units)
        self.forget()
        self._context.gradient_scale.renew()  # last: gradients that were summed before had the scale of before

    def forget(self) -> None:
        """Forget what people did to gradients that are dropped."""
        self._factors.clear()
        self._by_hand.clear()
        self._context.gradient_scale.clip = 1.0

    def go_on_from(self, other: "Gradients") -> None:
        """Take over what people did to gradients, and show them again: other units, the same gradients."""
        self._by_hand = dict(other._by_hand)
        self._hooks.handles.put_on()

    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient of a parameter with a whole value."""
        self._check_not_begun("A gradient was set")
        self._access.set_grad(parameter, value)
        if self._context.ranks.world_size > 1:
            # Of a value that ranks divide each sets its own elements.
            digest = "its own elements" if is_divided(value) else _digest(value)
            self._by_hand[f"the gradient that was set for '{self._access.name(parameter)}'"] = digest
        self._hooks.handles.show(self._by_tensor[parameter])

    @engine_entry
    def drop(self, parameters: Sequence[UnitParameter]) -> None:
        """Forget the gradients of some parameters, as `zero_grad` does those of all."""
        self._check_not_begun("A gradient was dropped")
        for parameter in parameters:
            parameter.drop_gradient()
            self._factors.pop(parameter, None)
            self._reducer.forget(self._parameters[parameter], parameter.index)
            self._by_hand[f"the gradient that was dropped of '{parameter.name}'"] = "dropped"
        if not any(parameter.shows_gradient for parameter in self._parameters):
            self.zero()  # `for p in model.parameters(): p.grad = None`
            self._by_hand["gradients that were dropped"] = "all"

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Have the next step clip the gradient's norm. Return the norm before clipping. Collective."""
        if norm_type == 2:
            norm = self._stepper.measure().grad_norm
        else:
            norm = total(self._access.grad_norms(norm_type), norm_type)
        # The same norm on every rank, and so the same scale: else each would update its shard with another.
        if math.isfinite(norm):
            self._context.gradient_scale.clip *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def norm(self, parameter: UnitParameter, norm_type: float) -> float:
        """Tell the norm of a gradient over all ranks, as it is scaled by now. Collective, unless norms are known."""
        if not norm_type > 0:
            raise EngineError(
                f"A norm of order {norm_type} of a gradient: use an order above 0, or optimizer.full_grad."
            )
        known = self._norms.get(norm_type)
        if known is None or self._known_changes != self._reducer.changes:
            known = self._taken(norm_type)
        return known[parameter] * abs(self._context.gradient_scale.clip * self._factors.get(parameter, 1.0))

    def scale(self, parameter: UnitParameter, factor: float) -> None:
        """Take note that a gradient is multiplied: for all of them it is a factor of the update, as of `clip`."""
        self._check_not_begun("Gradients were clipped or multiplied")
        known = self._known_changes == self._reducer.changes
        if not known:  # else it was checked when norms were taken: torch's clipping comes here for each parameter
            self._check_complete("clip_grad_norm_")
        elif not self._finite:
            return  # the step is skipped, whatever a gradient that is not finite is multiplied with
        if factor == 0:
            raise EngineError(
                f"The gradient of '{parameter.name}' was multiplied with 0, or clipped to a norm of 0. "
                "optimizer.zero_grad() or parameter.grad = None drop gradients; optimizer.set_full_grad sets zeros."
            )
        self._factors[parameter] = self._factors.get(parameter, 1.0) * factor

    @engine_entry
    def _taken(self, norm_type: float) -> Mapping[UnitParameter, float]:
        """Take the norms of all gradients, without the clip: one collective for all of them. They are kept."""
        if self._known_changes != self._reducer.changes:
            self._norms.clear()
        with self._hooks.under_way.turn("clip_grad_norm_"):
            with self._context.ranks.control_group.together(TOTAL_NORM) as facts:
                self._check_not_begun("The norm of gradients was asked for")
                # Without a look: a tensor that was set is clipped by torch, beside handles, and taken over afterwards.
                self._check_complete("clip_grad_norm_")
                facts["norm_type"] = norm_type
                facts.update(self.by_hand)
            if norm_type == 2:
                squares = self._stepper.measure().squared_norms
                found = [math.sqrt(square) * self._context.gradient_scale.size for square in squares]
            else:
                found = self._access.grad_norms(norm_type)
            clip = abs(self._context.gradient_scale.clip)
            whole = [norm / clip for norm in found]
            self._norms[norm_type] = dict(zip(self._parameters, whole, strict=True))
            left = self._norms[norm_type].keys() - self._touched()
            self._finite = all(math.isfinite(self._norms[norm_type][parameter]) for parameter in left)
            self._known_changes = self._reducer.changes
        return self._norms[norm_type]

    def _apply_factors(self) -> None:
        """Apply what gradients were multiplied with: one factor for all to the update, others to each gradient."""
        factors, self._factors = self._factors, {}
        # Not those that were replaced or dropped since: they are taken over as they are.
        shown = {p for p in self._parameters if p.shows_gradient}.difference(self._touched())
        if factors.keys() >= shown and len(set(factors.values())) == 1:
            self._context.gradient_scale.clip *= next(iter(factors.values()))
            return
        for parameter, factor in factors.items():
            if factor != 1:
                self._access.scale_grad(parameter.tensor, factor)
                self._by_hand[f"the factor of the gradient of '{parameter.name}'"] = factor

    def _check_not_begun(self, what: str) -> None:
        if self._stepper.is_open:
            raise EngineError(
                f"{what} between backward and step, and updates have begun in that backward. Call step() first, or use "
                "overlap='forward'."
            )


def total(norms: Sequence[float], norm_type: float) -> float:
    """Compute the norm of all of norms of parts."""
    if any(map(math.isnan, norms)):
        return math.nan
    if math.isinf(norm_type):
        return max(norms, default=0.0)
    return float(sum(norm**norm_type for norm in norms) ** (1 / norm_type))


def _digest(value: Tensor) -> str:
    """Compute what ranks compare of a value that each of them has set."""
    elements = value.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
