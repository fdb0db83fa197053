"""The accelerator of a trainer: what it goes on with, what it takes over, and where empty models have their values."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.integrations.accelerate import PenstockAccelerator
from penstock.integrations.accelerate.pairs import Pair
from penstock.integrations.transformers.weights import folder_of, is_empty

#: What a model has while a trainer has prepared it: its pair, for whoever trains it next.
HELD = "_penstock_pair"

logger = logging.getLogger(__name__)


class TrainerAccelerator(PenstockAccelerator):
    """The accelerator of one trainer, which frees memory before each `train`, and then goes on with its optimizer.

    Arguments:
        model: gives the trainer's model as it is now.
        kwargs: as for `PenstockAccelerator`.

    Attributes:
        resumed: the folder of weights that a model without values goes on from; `None`: the one it came from.
    """

    def __init__(self, model: Callable[[], nn.Module | None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._model = model
        self.resumed: Path | None = None

    def is_prepared(self, model: nn.Module | None) -> bool:
        """Tell whether a model is prepared, and nobody has closed it since."""
        return any(pair.model is model and pair.is_open for pair in self._pairs)

    def arguments_of(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the arguments of `penstock.prepare` for a model; one without values has them in a folder."""
        arguments = super().arguments_of(model)
        if not is_empty(model):  # it has been trained, or is another one, such as a reference
            return {name: value for name, value in arguments.items() if name != "weights"}
        if self.resumed is not None and model is self._model():
            return {**arguments, "weights": self.resumed}
        return arguments if "weights" in arguments else {**arguments, "weights": folder_of(model)}

    def take_over(self, model: nn.Module) -> None:
        """Have a model given back that another trainer has prepared, so that this one can prepare it. Collective."""
        held: Pair | None = vars(model).get(HELD)
        if held is not None and held not in self._pairs and held.is_open:
            logger.warning("The %s is prepared by another trainer, whose moments go.", type(model).__name__)
            held.close()
        vars(model).pop(HELD, None)

    def _pair(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        for model in models:
            self.take_over(model)
        super()._pair(models, optimizers)
        for pair in self._pairs:
            vars(pair.model)[HELD] = pair

    def _close(self, pair: Pair) -> None:
        super()._close(pair)
        vars(pair.model).pop(HELD, None)

    def free_memory(self, *objects: Any) -> Any:
        """Close every pair but the model that is trained, whose moments would go with it. Collective.

        Models beside it that nothing trains stay too, such as references: their owner has them from its constructor.
        """
        kept = [p for p in self._pairs if p.is_open and (p.wrapper is not None) == (p.model is self._model())]
        self._pairs = [pair for pair in self._pairs if pair not in kept]
        try:
            return super().free_memory(*objects)
        finally:
            self._pairs += kept
