"""Gradients between backward and step: the policy of a step, and changes that the user makes to gradients."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.forward_backward.hooks import Hooks
from penstock.engine.gradients.proxy import is_proxy_of
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
# The policy of a step: the scale of the loss, the condition of a skip, the norm that gradients are clipped to.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepPolicy:
    """`backward` and `step` of the optimizer, after all checks.

    Attributes:
        gatherer: marks gathered units as outdated before an update.
        hooks: run the backward of a loss.
        stepper: measures gradients, decides, and updates.
        skips: counts skipped steps.
        max_grad_norm: the norm that every step clips to; `None` for no clipping.
        waits: True if resident parameters are up to date when a step returns.
    """

    context: EngineContext
    gatherer: Gatherer
    hooks: Hooks
    stepper: Stepper
    skips: SkippedSteps
    max_grad_norm: float | None
    waits: bool

    def __post_init__(self) -> None:
        # With a device, forward and backward allocate nothing on the host that would fragment it.
        streams = self.context.streams
        self._growth = Growth(streams.return_free_memory) if streams.computes_on_host else None

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run the backward of a loss, multiplied by the loss scale if there is one (fp16).

        Raises:
            EngineError: the loss does not require a gradient.
        """
        self.hooks.backward.check()  # before the `try`, which drops gradients on an error
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
        """Update every parameter that has a gradient on any rank, or none if the norm is not finite. Collective.

        1. Measure the gradient over ranks, and decide.
        2. Mark gathered units and graphs from before the step as outdated.
        3. Update, and point resident parameters at the new values.
        """
        measure = self.stepper.measure()
        if not math.isfinite(measure.grad_norm):
            self.stepper.skip()
            self.skips.step_skipped(measure.flawed)
            return StepResult(float("nan"), skipped=True, loss_scale=self.context.gradient_scale.loss_scale)
        updated = {unit: slots for unit, slots in measure.present.items() if slots}
        # Before the first write: gathered buffers have the values of before, and the next use of a unit gathers it
        # again, after its update (ordering rule 6).
        for unit in updated:  # graphs of other units stay valid
            self.gatherer.outdate(unit)
        for unit, slots in updated.items():
            unit.count_writes(slots)
        self.stepper.update(measure, self.max_grad_norm)
        # After the updates are recorded in the storages: resident parameters follow them, or are unset until they end.
        self.gatherer.show_resident(self.context.units, wait=self.waits)
        self.skips.step_made()
        if self._growth is not None:  # now, when no activations are held
            self._growth.look()
        return StepResult(measure.grad_norm, skipped=False, loss_scale=self.context.gradient_scale.loss_scale)


# ----------------------------------------------------------------------------------------------------------------------
# Changes of gradients between backward and step: norms, factors, values that are set, gradients that are dropped.
#
# There are two ways for the same: methods of the optimizer, and `.grad` with torch's own functions
# (`gradients/proxy.py`). An assignment to `.grad` calls no code of the engine. It is found by the next `look`: at the
# beginning of a forward or backward of the model, and in every method that needs gradients.
# ----------------------------------------------------------------------------------------------------------------------


TOTAL_NORM = "the norm of gradients (torch.nn.utils.clip_grad_norm_, get_total_norm, parameter.grad.norm)"


class Gradients:
    """Changes that are made to the gradients of an engine after backward.

    Arguments:
        hooks: have the gradient proxies.
        reducer: has the reduced gradients.
        stepper: measures gradients.
        access: reads and writes the gradients of single parameters.
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
        self._known_changes = -1  # `changes` of the reducer when `_norms` were taken
        self._finite = True  # all gradients at that time
        self._factors: dict[UnitParameter, float] = {}  # factors of gradients that are not applied yet
        self._by_hand: dict[str, object] = {}  # changes by the user since the last `zero`
        hooks.proxies.answers = self

    @property
    def by_hand(self) -> Mapping[str, object]:
        """Gradients that the user has set, dropped or scaled. Ranks compare it: each rank changes its own shard."""
        return dict(sorted(self._by_hand.items()))

    def check_whole(self, verb: str) -> None:
        """Refuse gradients that are incomplete, and take over changes that the user made in `.grad`.

        Arguments:
            verb: the method that was called, for messages.

        Raises:
            EngineError: names what is missing.
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
        if self._reducer.holds_back():
            raise EngineError(
                f"Gradients of no_sync micro-batches are not reduced yet. Run the last backward before {verb}() "
                "outside no_sync(), or drop them with zero_grad()."
            )

    def look(self) -> None:
        """Take over values that were put into `.grad`, removed from it, or multiplied. Not collective.

        Raises:
            ConfigError: a value that no gradient can have.
            EngineError: the gradient proxy of another parameter, or updates have begun.
        """
        if self._factors:
            self._apply_factors()
        dropped = []
        for parameter in self._touched():
            grad = parameter.tensor.grad
            if grad is None:
                dropped.append(parameter)
            elif is_proxy_of(grad, parameter):
                self._hooks.proxies.show(parameter)
            else:
                self.set(parameter.tensor, grad)
        if dropped:
            self.drop(dropped)

    def _touched(self) -> list[UnitParameter]:
        """Return the parameters whose `.grad` is not what the engine left there: the gradient proxy, or `None`."""
        return [p for p in self._parameters if p.tensor.grad is not p.left]

    def zero(self) -> None:
        """Forget all gradients, also those that were set by the user, and take up the next loss scale."""
        self._hooks.backward.has_failed = False
        self._reducer.zero()
        self.forget()
        self._context.gradient_scale.renew()  # last: the dropped gradients had the scale of before

    def forget(self) -> None:
        """Forget changes by the user, because the gradients are dropped."""
        self._factors.clear()
        self._by_hand.clear()
        self._context.gradient_scale.clip = 1.0

    def take_over_counts(self, other: "Gradients") -> None:
        """Take over the changes that are recorded in another one, and put gradient proxies on: units have changed."""
        self._by_hand = dict(other._by_hand)
        self._hooks.proxies.put_on()

    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient of a parameter with a whole value."""
        self._check_not_begun("A gradient was set")
        self._access.set_grad(parameter, value)
        if self._context.ranks.world_size > 1:
            # Of a DTensor each rank sets its own elements.
            digest = "its own elements" if is_divided(value) else _digest(value)
            self._by_hand[f"the gradient that was set for '{self._access.name(parameter)}'"] = digest
        self._hooks.proxies.show(self._by_tensor[parameter])

    @engine_entry
    def drop(self, parameters: Sequence[UnitParameter]) -> None:
        """Forget the gradients of some parameters, as `zero_grad` does those of all."""
        self._check_not_begun("A gradient was dropped")
        for parameter in parameters:
            parameter.drop_gradient()
            self._factors.pop(parameter, None)
            self._reducer.forget(self._parameters[parameter], parameter.index)
            self._by_hand[f"the gradient that was dropped of '{parameter.name}'"] = "dropped"
        if all(parameter.left is None for parameter in self._parameters):
            self.zero()  # `for p in model.parameters(): p.grad = None`
            self._by_hand["gradients that were dropped"] = "all"

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Have the next step clip the gradient's norm; return the norm before clipping. Collective."""
        if norm_type == 2:
            norm = self._stepper.measure().grad_norm
        else:
            norms = torch.tensor(self._access.grad_norms(norm_type), dtype=torch.float64)
            norm = float(torch.linalg.vector_norm(norms, norm_type))
        # The norm is the same on every rank, and so is the scale of the update.
        if math.isfinite(norm):
            self._context.gradient_scale.clip *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def norm(self, parameter: UnitParameter, norm_type: float) -> float:
        """Return the norm of a gradient over all ranks, with all factors. Collective, unless norms are known."""
        if not norm_type > 0:
            raise EngineError(
                f"A norm of order {norm_type} of a gradient: use an order above 0, or optimizer.full_grad."
            )
        known = self._norms.get(norm_type)
        if known is None or self._known_changes != self._reducer.changes:
            known = self._taken(norm_type)
        return known[parameter] * abs(self._context.gradient_scale.clip * self._factors.get(parameter, 1.0))

    def scale(self, parameter: UnitParameter, factor: float) -> None:
        """Record a factor of a gradient. The same factor for all gradients becomes one of the update, as in `clip`."""
        self._check_not_begun("Gradients were clipped or multiplied")
        known = self._known_changes == self._reducer.changes
        if not known:  # once, when norms are taken: torch's clipping calls this for each parameter
            self._check_complete("clip_grad_norm_")
        elif not self._finite:
            return  # the step is skipped, whatever the factor
        if factor == 0:
            raise EngineError(
                f"The gradient of '{parameter.name}' was multiplied with 0, or clipped to a norm of 0. "
                "optimizer.zero_grad() or parameter.grad = None drop gradients; optimizer.set_full_grad sets zeros."
            )
        self._factors[parameter] = self._factors.get(parameter, 1.0) * factor

    @engine_entry
    def _taken(self, norm_type: float) -> Mapping[UnitParameter, float]:
        """Measure the norms of all gradients, without the clip, by one collective. They are kept until a change."""
        if self._known_changes != self._reducer.changes:
            self._norms.clear()
        with self._hooks.owner_thread.turn("clip_grad_norm_"):
            with self._context.ranks.control_group.together(TOTAL_NORM) as rank_checks:
                self._check_not_begun("The norm of gradients was asked for")
                # Without `look`: torch clips a tensor that was set beside the proxies. It is taken over afterwards.
                self._check_complete("clip_grad_norm_")
                rank_checks["norm_type"] = norm_type
                rank_checks.update(self.by_hand)
            if norm_type == 2:
                squares = self._stepper.measure().squared_norms
                found = [math.sqrt(square) * self._context.gradient_scale.size for square in squares]
            else:
                found = self._access.grad_norms(norm_type)
            clip = abs(self._context.gradient_scale.clip)
            whole = [norm / clip for norm in found]
            self._norms[norm_type] = dict(zip(self._parameters, whole, strict=True))
            known = self._norms[norm_type].items()
            self._finite = all(math.isfinite(norm) for p, norm in known if p.tensor.grad is p.left)
            self._known_changes = self._reducer.changes
        return self._norms[norm_type]

    def _apply_factors(self) -> None:
        """Apply the recorded factors: one factor of all gradients to the update, others to each gradient."""
        factors, self._factors = self._factors, {}
        # Not gradients that were replaced or dropped since: those are taken over as they are.
        shown = {p for p in self._parameters if p.left is not None and p.tensor.grad is p.left}
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


def _digest(value: Tensor) -> str:
    """Return a digest of a value that every rank sets, for ranks to compare."""
    elements = value.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
