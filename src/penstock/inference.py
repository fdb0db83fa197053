"""The handle of a model that nothing trains: what `prepare(model, None)` returns."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.engine import Engine
from penstock.errors import EngineError
from penstock.optimizer import Optimizer


class Inference(Optimizer):
    """A `penstock.Optimizer` without param groups: what looks at parameters, moves and keeps them works as always.

    There are no gradients and no updates. What would make some raises `EngineError`; `zero_grad` and `no_sync` have
    nothing to do, so that loops over several models may call them of all.
    """

    def __init__(self, engine: Engine) -> None:
        # Torch refuses an optimizer of nothing: this one stands for it with an empty group, which goes again.
        super().__init__(torch.optim.Optimizer([{"params": []}], {}), engine)
        self.param_groups.clear()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a learning-rate scheduler, which puts a `step` of its own here: it would do nothing."""
        if name == "step":
            _refuse("A learning-rate scheduler of this optimizer")
        super().__setattr__(name, value)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> NoReturn:
        """Refuse a backward of its own: `loss.backward()`, or `backward` of whoever trains, goes through to the inputs.

        Raises:
            EngineError: always.
        """
        del loss, retain_graph
        _refuse("backward()", " A gradient for its inputs is loss.backward(), or backward() of whatever is trained.")

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse a step: nothing trains the model.

        Raises:
            EngineError: always.
        """
        del closure
        _refuse("step()")

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> NoReturn:
        """Refuse to clip: there is no gradient.

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
    """Raise the error of everything that only training has."""
    raise EngineError(
        f"{what}: the model was prepared for inference, by prepare(model, None), and nothing trains it.{instead} To "
        "train it, close() and prepare(model, optimizer)."
    )
