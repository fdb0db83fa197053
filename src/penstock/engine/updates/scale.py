"""What a gradient in its home is multiplied with to be the gradient of the loss."""

import math
from collections.abc import Mapping

from penstock.errors import EngineError


class LossScale:
    """The factor by which fp16 losses are multiplied, so that small gradients do not vanish; as `torch.amp.GradScaler`.

    A new factor counts from the next `zero_grad` on: gradients that are summed have one factor.

    Arguments:
        value: the first factor.
        dynamic: halve it after a step whose gradient is not finite, as long as it is above `LEAST`; double it after
            2,000 that are.

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
        """Return the factor and what it will be, as numbers that `restore` takes."""
        return {"value": self.value, "next": self._next, "finite_steps": self._finite_steps}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from where another loss scale was when it returned this state."""
        self.value, self._next = state["value"], state["next"]
        self._finite_steps = int(state["finite_steps"])

    @property
    def may_fall(self) -> bool:
        """Whether a step whose gradient is not finite makes it smaller."""
        return self.dynamic and self.value > self.LEAST

    def update(self, *, finite: bool) -> None:
        """Choose the next factor, after a step that was made (`finite`) or skipped. It counts from `renew` on."""
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
        """Take up the next factor: the gradients that were summed with this one are dropped."""
        self.value = self._next


class GradientScale:
    """The scale of gradients: of the mean over ranks, of the loss, and of a clip that the user asked for.

    Arguments:
        mean: 1 / world size for the mean over ranks, 1 for the sum.
        loss: the loss scale; `None` without one.

    Attributes:
        clip: the factor of the clips that were asked for since the last `zero_grad`.
    """

    def __init__(self, mean: float, loss: LossScale | None = None) -> None:
        self._mean = mean
        self.loss = loss
        self.clip = 1.0

    @property
    def value(self) -> float:
        """What a gradient in its home is multiplied with."""
        return self._mean * self.clip / self.loss_scale

    @property
    def size(self) -> float:
        """What the norm of a gradient in its home is multiplied with."""
        return abs(self.value)

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied with."""
        return 1.0 if self.loss is None else self.loss.value

    def check_not_clipped(self) -> None:
        """Refuse another micro-batch: its gradient would be added to one that is not clipped yet, and clipped as well.

        Raises:
            EngineError: the gradient was clipped.
        """
        if self.clip != 1.0:
            raise EngineError(
                "backward() was called after clip_grad_norm_(), which comes last: run all micro-batches, then clip, "
                "then step(); or use prepare(max_grad_norm=...)."
            )

    def renew(self) -> None:
        """Begin anew, without a clip and with the next loss scale: the summed gradients are dropped."""
        self.clip = 1.0
        if self.loss is not None:
            self.loss.renew()
