"""The handle that `prepare(model, None)` returns, for a model that is not trained."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.optimizer import Optimizer


class Inference(Optimizer):
    """A `penstock.Optimizer` without param groups: methods that read, move and save parameters work as always.

    There are no gradients and no updates, and methods that need them raise `EngineError`. `zero_grad` and `no_sync` do
    nothing, so that loops over several models may call them for each.
    """

    def __init__(self, engine: Engine) -> None:
        # Torch refuses an optimizer without param groups: this one has an empty group, which is removed again.
        super().__init__(torch.optim.Optimizer([{"params": []}], {}), engine)
        self.param_groups.clear()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a learning-rate scheduler, which replaces `step`: there is nothing to schedule."""
        if name == "step":
            _refuse("A learning-rate scheduler of this optimizer")
        super().__setattr__(name, value)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> NoReturn:
        """Refuse a backward: `loss.backward()`, or `backward` of the trained model's optimizer, reaches the inputs.

        Raises:
            EngineError: always.
        """
        del loss, retain_graph
        _refuse("backward()", " A gradient for its inputs is loss.backward(), or backward() of whatever is trained.")

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse a step: the model is not trained.

        Raises:
            EngineError: always.
        """
        del closure
        _refuse("step()")

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> NoReturn:
        """Refuse clipping: there are no gradients.

        Raises:
            EngineError: always.
        """
        del max_norm, norm_type
        _refuse("clip_grad_norm_()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: parameters have no optimizer state here.

        Raises:
            EngineError: always, on a prepared model.
        """
        if self._engine is not None:
            _refuse("add_param_group()")
        super().add_param_group(param_group)


def _refuse(what: str, instead: str = "") -> NoReturn:
    """Raise the error of a method that needs training."""
    raise EngineError(
        f"{what}: the model was prepared for inference, by prepare(model, None), and nothing trains it.{instead} To "
        "train it, close() and prepare(model, optimizer)."
    )
