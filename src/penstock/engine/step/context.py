"""The context that all components of an engine share; the loss scale and skipped steps."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock._native import Pool
from penstock.engine.unit.unit import TrainingState, Unit
from penstock.errors import EngineError
from penstock.rules.rule import Rule
from penstock.runtime.collectives import Collectives
from penstock.runtime.streams import Streams
from penstock.tiers.staging import Staging
from penstock.tiers.tier import Store
from penstock.tiers.transfer import Transfers

# ----------------------------------------------------------------------------------------------------------------------
# The factor between a gradient in its storage and the gradient of the loss.
# ----------------------------------------------------------------------------------------------------------------------


class LossScale:
    """The factor by which fp16 losses are multiplied, so that small gradients do not vanish; as `torch.amp.GradScaler`.

    A new factor counts from the next `zero_grad` on: gradients that are summed have one factor.

    Arguments:
        value: the first factor.
        dynamic: halve it after a step with a gradient that is not finite, while it is above `LEAST`; double it after
            2,000 steps with finite ones.

    Source: Micikevicius et al., "Mixed Precision Training", 2018. The least scale is DeepSpeed's: a loss that
    overflows as it is does not fit into fp16, and a scale that is halved for ever becomes 0.
    """

    GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
    LEAST = 1.0

    def __init__(self, value: float, *, dynamic: bool) -> None:
        self.value = value
        self.dynamic = dynamic
        self._next = value
        self._finite_steps = 0

    def state(self) -> dict[str, float]:
        """Return the factor and the next one, as numbers that `restore` reads."""
        return {"value": self.value, "next": self._next, "finite_steps": self._finite_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of another loss scale."""
        self.value, self._next = state["value"], state["next"]
        self._finite_steps = int(state["finite_steps"])

    @property
    def may_fall(self) -> bool:
        """True if a step with a gradient that is not finite lowers the factor."""
        return self.dynamic and self.value > self.LEAST

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, after a step that was made (`finite`) or skipped. `renew` applies it."""
        if not self.dynamic:
            return
        if not finite:
            self._next = max(self.value * self.BACKOFF, min(self.value, self.LEAST))
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == self.GROWTH_INTERVAL:
            self._finite_steps = 0
            grown = self.value * self.GROWTH
            self._next = grown if math.isfinite(grown) else self.value

    def renew(self) -> None:
        """Apply the next factor. Precondition: gradients with the present factor were dropped."""
        self.value = self._next


class GradientScale:
    """The scale of gradients: for the mean over ranks, the loss scale, and clips by the user.

    Arguments:
        mean: 1 / world size for the mean over ranks, 1 for the sum.
        loss: the loss scale; `None` without one.

    Attributes:
        clip: the product of the clips since the last `zero_grad`.
    """

    def __init__(self, mean: float, loss: LossScale | None = None) -> None:
        self._mean = mean
        self.loss = loss
        self.clip = 1.0

    @property
    def value(self) -> float:
        """The factor of a gradient in its storage."""
        return self._mean * self.clip / self.loss_scale

    @property
    def size(self) -> float:
        """The factor of the norm of a gradient in its storage."""
        return abs(self.value)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss."""
        return 1.0 if self.loss is None else self.loss.value

    def check_not_clipped(self) -> None:
        """Refuse another micro-batch after a clip: the clip would also apply to its gradient.

        Raises:
            EngineError: the gradient was clipped.
        """
        if self.clip != 1.0:
            raise EngineError(
                "backward() was called after clip_grad_norm_(), which comes last: run all micro-batches, then clip, "
                "then step(); or use prepare(max_grad_norm=...)."
            )

    def renew(self) -> None:
        """Reset the clip and apply the next loss scale. Precondition: gradients were dropped."""
        self.clip = 1.0
        if self.loss is not None:
            self.loss.renew()


# ----------------------------------------------------------------------------------------------------------------------
# The context of an engine: one value, made once units have their memory.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class EngineContext:
    """Context shared by all components of an engine, which read it when they need it.

    `add_param_group` alone changes it: units and rule.

    Attributes:
        model: the prepared model.
        units: all of its parameters, in the order of their index.
        ranks: the process groups.
        streams: the streams beside compute.
        pool: the threads of host arithmetic.
        store: the table of all segments, with their memory and files.
        staging: the buffers of updates and gathers.
        transfers: transfers between storages.
        rule: the arithmetic of the optimizer.
        gradient_scale: the factor of a gradient in its storage.
        param_groups: those of the optimizer, which users and schedulers change between steps; none without one.
    """

    model: nn.Module
    units: Sequence[Unit]
    ranks: Collectives
    streams: Streams
    pool: Pool
    store: Store
    staging: Staging
    transfers: Transfers
    rule: Rule
    gradient_scale: GradientScale
    param_groups: Sequence[dict[str, Any]]

    @property
    def trained(self) -> list[tuple[Unit, TrainingState]]:
        """The units that the optimizer updates, each with its training state."""
        return [(unit, unit.trained) for unit in self.units if unit.trained is not None]

    @property
    def trains(self) -> bool:
        """True if there is an optimizer; else all parameters are frozen."""
        return bool(self.param_groups)


# ----------------------------------------------------------------------------------------------------------------------
# Steps that were skipped because the gradient is not finite: one warning, then an error after too many in a row.
#
# A falling loss scale skips steps as a matter of course, so steps in fp16 count once the scale cannot fall any further.
# In fp32 and bf16 nothing falls: a gradient that is not finite mostly stays so.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_NAMED = 8
_WHERE_TO_LOOK = (
    "Look for an overflow in the loss or in the model (torch.autograd.detect_anomaly() finds the operation), and for a "
    "bad batch"
)


class SkippedSteps:
    """Counts the steps that were skipped in a row, and updates the loss scale.

    Arguments:
        most: the number in a row that raises an error; `None` for never.
        at_once: the first one raises.
        loss_scale: the loss scale of fp16; `None` without one.

    Attributes:
        in_a_row: the number of counted steps that were skipped since the last step that was made.
    """

    def __init__(self, most: int | None, *, at_once: bool, loss_scale: LossScale | None) -> None:
        self._most = most
        self._at_once = at_once
        self._loss_scale = loss_scale
        self._was_said = False
        self.in_a_row = 0

    def step_made(self) -> None:
        """Reset the count after a step that was made."""
        self.in_a_row = 0
        if self._loss_scale is not None:
            self._loss_scale.update(finite=True)

    def step_skipped(self, flawed: Sequence[str]) -> None:
        """Count a step that was skipped.

        Arguments:
            flawed: names of the parameters whose gradient is not finite on any rank.

        Raises:
            EngineError: there are too many in a row, or one is too many.
        """
        may_fall = self._loss_scale is not None and self._loss_scale.may_fall  # before the update, which lowers it
        if self._loss_scale is not None:
            self._loss_scale.update(finite=False)
        if may_fall:
            return
        self.in_a_row += 1
        scale = self._loss_scale
        where = name_flawed(flawed)
        where += "" if scale is None else f" The loss scale is {scale.value:g}, and does not fall any further."
        where += f" {_WHERE_TO_LOOK}"
        if self._at_once:
            raise EngineError(
                f"The norm of the gradient is not finite; nothing was updated. {where}; or use "
                "Options(on_nonfinite='skip')."
            )
        if self._most is not None and self.in_a_row >= self._most:
            raise EngineError(
                f"{self.in_a_row} steps in a row were skipped, because the gradient was not finite: nothing was "
                f"updated in them. {where}. Options(max_skipped_steps=None) goes on for ever."
            )
        if not self._was_said:
            self._was_said = True
            warnings.warn(
                f"The step was skipped, because the gradient is not finite. {where}. This is said once; "
                f"StepResult.skipped tells of every such step"
                + (f", and {self._most} in a row are an error." if self._most is not None else "."),
                stacklevel=8,  # the caller of step(), behind the policy, our wrappers and torch's
            )


def name_flawed(flawed: Sequence[str]) -> str:
    """Return the sentence that names parameters whose gradient is not finite."""
    if not flawed:  # each square is finite, and their sum is not
        return "No single parameter's is: all together are too large."
    names = ", ".join(f"'{name}'" for name in flawed[:_MOST_NAMED])
    more = f" and {len(flawed) - _MOST_NAMED} more" if len(flawed) > _MOST_NAMED else ""
    return f"Not finite: of {names}{more}."
