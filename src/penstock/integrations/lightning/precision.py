"""Lightning's names of precisions, in Penstock's: the engine casts and scales, so no autocast and no scaler runs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricMixed
from lightning.fabric.plugins.precision.half import HalfPrecision as FabricHalf
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

import penstock
from penstock.errors import ConfigError

ComputePrecision = Literal["fp32", "bf16", "fp16"]

#: What Lightning's precisions are here. "true" and "mixed" are one: parameters compute in the dtype, masters are fp32.
COMPUTE: dict[str, ComputePrecision] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "16-true": "fp16",
}
_NAMES: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_PLUGINS = (Precision, HalfPrecision, MixedPrecision, FabricPrecision, FabricHalf, FabricMixed)


class PenstockPrecision(Precision):
    """The precision plugin of `PenstockStrategy`. A Trainer makes it of its `precision=`, or gets it in `plugins`.

    Arguments:
        precision: the compute dtype: `"fp32"`, `"bf16"` or `"fp16"`.

    Raises:
        ConfigError: it is none of them.

    Attributes:
        compute: the compute dtype, as `penstock.prepare` takes it.
        step_result: what the last optimizer step returned, with the norm before clipping; `None` before the first.

    Example:
        >>> Trainer(strategy="penstock", plugins=[PenstockPrecision("bf16")])  # doctest: +SKIP
    """

    def __init__(self, precision: ComputePrecision = "bf16") -> None:
        self.compute = checked(precision)
        self.precision = name_of(precision)
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
        scaled_backward(bare(optimizer), tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward) and the hooks before the step, then the step.

        Returns:
            What the closure returned, as other strategies do; `step_result` has what the step did.

        Raises:
            ConfigError: arguments that `step` does not have.
        """
        if kwargs:
            raise of_step(kwargs)
        with torch.enable_grad():
            returned = self._wrap_closure(model, optimizer, closure)
        result: penstock.StepResult = bare(optimizer).step()
        if self._unclipped is not None and not result.skipped:  # a step after `clip_grad_norm_` sees the clipped norm
            result = replace(result, grad_norm=self._unclipped)
        self.step_result, self._unclipped = result, None
        return returned

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the norm of the gradient over all parameters and ranks, as a factor of the update."""
        self._unclipped = float(bare(optimizer).clip_grad_norm_(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Refuse it: gradients are sharded, and are not changed one by one.

        Raises:
            ConfigError: always.
        """
        raise by_value()


def name_of(precision: ComputePrecision) -> Any:
    """Name a compute precision as Lightning does."""
    return _NAMES[precision]


def by_value() -> ConfigError:
    """Make the error of clipping by value; the caller raises it."""
    return ConfigError(
        "Clipping by value is not supported: gradients are not changed element by element before the update. Use "
        "gradient_clip_algorithm='norm'."
    )


def of_step(arguments: Iterable[str]) -> ConfigError:
    """Make the error of arguments that `step` does not have; the caller raises it."""
    return ConfigError(f"optimizer.step({', '.join(arguments)}=): Penstock's takes a closure alone. Leave them out.")


def bare(optimizer: Any) -> Any:
    """Return Penstock's optimizer, of which Lightning may have handed over its wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def scaled_backward(optimizer: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Run the backward of a loss that the optimizer scales first.

    Raises:
        ConfigError: an argument is not `retain_graph`.
    """
    if args or kwargs.keys() - {"retain_graph"}:
        raise ConfigError("In fp16, backward takes the loss and retain_graph= alone. Leave other arguments out.")
    optimizer.backward(loss, retain_graph=bool(kwargs.get("retain_graph")))


def checked(precision: Any) -> ComputePrecision:
    """Check the name of a compute precision.

    Raises:
        ConfigError: it is none.
    """
    for known in COMPUTE.values():
        if precision == known:
            return known
    raise ConfigError(f"precision={precision!r}: use one of 'fp32', 'bf16', 'fp16'.")


def compute_of(plugin: Any, wanted: Any) -> ComputePrecision:
    """Decide on the compute precision.

    Arguments:
        plugin: the plugin that Lightning has made of `precision=`, or the user's own.
        wanted: what the strategy was given; `None` where it was given nothing.

    Raises:
        ConfigError: the plugin's precision is one that Penstock does not have, or both say something else.
    """
    name = getattr(plugin, "precision", None)
    known = type(plugin) in _PLUGINS or hasattr(plugin, "compute")
    if not known or name not in COMPUTE:
        raise ConfigError(
            f"The strategy 'penstock' does not take {type(plugin).__name__} (precision={name!r}). Use one of "
            f"{', '.join(map(repr, COMPUTE))}."
        )
    # Lightning's own default is no wish: who names a precision for the strategy alone gets it.
    is_default = type(plugin) in (Precision, FabricPrecision)
    if wanted is None or (not is_default and checked(wanted) == COMPUTE[name]):
        return COMPUTE[name]
    if not is_default:
        raise ConfigError(
            f"The strategy was given precision={wanted!r}, and the Trainer (or Fabric) {name!r}. Leave one of them out."
        )
    return checked(wanted)
