"""The precision plugin of a Trainer on Penstock: the engine casts and scales, so no autocast and no scaler runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

import penstock
from penstock.errors import ConfigError
from penstock.integrations._common import ComputePrecision, check_precision, choose_precision

#: Lightning's precisions. "true" and "mixed" are one: parameters compute in the dtype, masters are fp32.
COMPUTE: dict[str, ComputePrecision] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}
_NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class PenstockPrecision(Precision):
    """The precision plugin of `PenstockStrategy`. A Trainer makes it of its `precision=`, or gets it in `plugins`.

    Arguments:
        precision: the compute dtype: `"fp32"`, `"bf16"` or `"fp16"`.

    Raises:
        ConfigError: it is none of them.

    Attributes:
        compute: the compute dtype, as `penstock.prepare` takes it.
        step_result: the result of the last optimizer step, with the norm before clipping; `None` before the first.

    Example:
        >>> Trainer(strategy="penstock", plugins=[PenstockPrecision("bf16")])  # doctest: +SKIP
    """

    def __init__(self, precision: ComputePrecision = "bf16") -> None:
        self.compute = check_precision(precision)
        self.precision = _NAMES[precision]
        self.step_result: penstock.StepResult | None = None
        self._unclipped: float | None = None

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward; in fp16 that of the optimizer, which scales the loss.

        Raises:
            ConfigError: in fp16, the module has a `backward` of its own, or an argument is not `retain_graph`.
        """
        if self.compute != "fp16":
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        if is_overridden("backward", model):
            raise ConfigError(
                f"{type(model).__name__} overrides backward(), and in fp16 the loss is scaled by the optimizer's. "
                "Remove it, or use precision='bf16-mixed'."
            )
        if args or kwargs.keys() - {"retain_graph"}:
            raise ConfigError("In fp16, backward takes the loss and retain_graph= alone. Leave other arguments out.")
        unwrapped(optimizer).backward(tensor, retain_graph=bool(kwargs.get("retain_graph")))

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward) and the hooks before the step, then the step.

        Returns:
            The return value of the closure, as other strategies do; `step_result` has the result of the step.
        """
        result: penstock.StepResult = super().optimizer_step(unwrapped(optimizer), model, closure, **kwargs)
        returned = result.loss
        if self._unclipped is not None and not result.skipped:  # a step after `clip_grad_norm_` sees the clipped norm
            result = replace(result, grad_norm=self._unclipped)
        self.step_result, self._unclipped = replace(result, loss=None), None
        return returned

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the norm of the gradient over all parameters and ranks, as a factor of the update."""
        self._unclipped = float(unwrapped(optimizer).clip_grad_norm_(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Refuse to clip by value: gradients are sharded, and are not changed one by one.

        Raises:
            ConfigError: always.
        """
        raise by_value()


def by_value() -> ConfigError:
    """Make the error of clipping by value; the caller raises it."""
    return ConfigError(
        "Clipping by value is not supported: gradients are not changed element by element before the update. Use "
        "gradient_clip_algorithm='norm'."
    )


def unwrapped(optimizer: Any) -> Any:
    """Return Penstock's optimizer, which Lightning may have wrapped."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def compute_of(plugin: Any, wanted: Any) -> ComputePrecision:
    """Choose the compute precision.

    Arguments:
        plugin: the plugin that Lightning has made of `precision=`, or the user's own.
        wanted: the precision that the strategy was given; `None` without one.

    Raises:
        ConfigError: Penstock does not have the plugin's precision, or the two differ.
    """
    name = getattr(plugin, "precision", None)
    is_known = type(plugin) in (Precision, HalfPrecision, MixedPrecision) or isinstance(plugin, PenstockPrecision)
    if not is_known or name not in COMPUTE:
        raise ConfigError(
            f"The strategy 'penstock' does not take {type(plugin).__name__} (precision={name!r}). Use one of "
            f"{', '.join(map(repr, COMPUTE))}."
        )
    # Lightning makes a plain Precision where no precision was given, too.
    given = None if type(plugin) is Precision else COMPUTE[name]
    return choose_precision(wanted, given, source=f"Trainer(precision={name!r})") or "fp32"
