"""Steps that were skipped because the gradient is not finite: said once, counted, and not for ever.

A loss scale that falls skips steps as a matter of course, so those of fp16 count only once the scale cannot fall any
more. In fp32 and bf16 nothing falls: what is not finite now mostly stays so.
"""

import warnings
from collections.abc import Sequence

from penstock.engine.updates.scale import LossScale
from penstock.errors import EngineError

_MOST_NAMED = 8
_WHERE_TO_LOOK = (
    "Look for an overflow in the loss or in the model (torch.autograd.detect_anomaly() finds the operation), and for a "
    "bad batch"
)


class Skips:
    """Counts the steps that were skipped in a row, and has the loss scale follow.

    Arguments:
        most: how many in a row raise an error; `None` for never.
        at_once: whether the first one raises.
        loss_scale: the one that follows in fp16; `None` without one.

    Attributes:
        in_a_row: how many that count were skipped since the last step that was made.
    """

    def __init__(self, most: int | None, *, at_once: bool, loss_scale: LossScale | None) -> None:
        self._most = most
        self._at_once = at_once
        self._loss_scale = loss_scale
        self._was_said = False
        self.in_a_row = 0

    def step_made(self) -> None:
        """Count a step that was made: those that were skipped in a row begin anew."""
        self.in_a_row = 0
        if self._loss_scale is not None:
            self._loss_scale.update(finite=True)

    def step_skipped(self, flawed: Sequence[str]) -> None:
        """Count a step that was skipped, in which nothing has changed.

        Arguments:
            flawed: names of the parameters whose gradient is not finite on any rank.

        Raises:
            EngineError: the last of too many in a row, or of one where one is too many.
        """
        may_fall = self._loss_scale is not None and self._loss_scale.may_fall  # asked first: the update lowers it
        if self._loss_scale is not None:
            self._loss_scale.update(finite=False)
        if may_fall:
            return
        self.in_a_row += 1
        if self._at_once:
            raise EngineError(
                f"The norm of the gradient is not finite; nothing was updated. {name_flawed(flawed)}"
                f"{self._at_which_scale()} {_WHERE_TO_LOOK}; or use Options(on_nonfinite='skip')."
            )
        if self._most is not None and self.in_a_row >= self._most:
            raise EngineError(
                f"{self.in_a_row} steps in a row were skipped, because the gradient was not finite: nothing was "
                f"updated in them. {name_flawed(flawed)}{self._at_which_scale()} {_WHERE_TO_LOOK}. "
                "Options(max_skipped_steps=None) goes on for ever."
            )
        if not self._was_said:
            self._was_said = True
            warnings.warn(
                f"The step was skipped, because the gradient is not finite. {name_flawed(flawed)}"
                f"{self._at_which_scale()} {_WHERE_TO_LOOK}. This is said once; StepResult.skipped tells of every such "
                f"step" + (f", and {self._most} in a row are an error." if self._most is not None else "."),
                stacklevel=8,  # whose call it is: behind the policy, step(), our wrappers and torch's
            )

    def _at_which_scale(self) -> str:
        if self._loss_scale is None:
            return ""
        return f" The loss scale is {self._loss_scale.value:g}, and does not fall any further."


def name_flawed(flawed: Sequence[str]) -> str:
    """Make the sentence that names parameters whose gradient is not finite."""
    if not flawed:  # each square is finite, and their sum is not
        return "No single parameter's is: all together are too large."
    names = ", ".join(f"'{name}'" for name in flawed[:_MOST_NAMED])
    more = f" and {len(flawed) - _MOST_NAMED} more" if len(flawed) > _MOST_NAMED else ""
    return f"Not finite: of {names}{more}."
