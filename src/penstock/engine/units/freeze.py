"""Parameters of a model that nothing trains: frozen, whatever they were, until the engine leaves them.

What is computed from them alone records no graph then, and a backward that comes through the model goes to its inputs.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn

from penstock.engine.units.unit import Unit
from penstock.errors import EngineError
from penstock.machine.border import crossing


class Freeze:
    """Freezes every parameter.

    Arguments:
        units: all of a model without an optimizer.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        parameters = [parameter for unit in units for parameter in unit.parameters]
        self._before = {p.tensor: p.required_grad for p in parameters if p.tensor.is_floating_point()}
        self._handles = []
        names = {parameter.tensor: parameter.name for parameter in parameters}
        for tensor in self._before:
            refuse = crossing(partial(_refuse_gradient, names[tensor]))
            tensor.requires_grad_(True)  # torch takes hooks of no others
            self._handles.append(tensor.register_post_accumulate_grad_hook(refuse))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(False)

    def remove(self) -> None:
        """Leave them as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for tensor, required_grad in self._before.items():
            tensor.requires_grad_(required_grad)


def _refuse_gradient(name: str, parameter: nn.Parameter) -> None:
    """Refuse the gradient of a parameter that somebody has unfrozen: it would be whole, and nobody's."""
    parameter.grad = None
    raise EngineError(
        f"Parameter '{name}' was unfrozen and got a gradient, and its model was prepared without an optimizer: nothing "
        "trains it. Leave it frozen, or close() and prepare(model, optimizer)."
    )
