"""Transforms of `torch.func`, which keep weights where nobody outside can see them."""

from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack

from penstock.engine.units.unit import Unit
from penstock.errors import EngineError

_DIFFERENTIATE = (TransformType.Grad, TransformType.Jvp)


def check_transform(unit: Unit, module: nn.Module) -> None:
    """Refuse to be differentiated by a transform where parameters do not stay: it takes no saved-tensor hooks.

    Raises:
        EngineError: names the unit and the module.
    """
    levels = get_interpreter_stack()
    if not (levels and unit.is_released_after_use and any(level.key() in _DIFFERENTIATE for level in levels)):
        return
    raise EngineError(
        f"{type(module).__name__} is called inside a differentiating transform of torch.func (grad, vjp, jacrev, "
        f"hessian, jvp), and the parameters of {unit.label} are released after use. Use torch.autograd.grad, or keep "
        "parameters where compute reads them: Placement(params='device') at stage 2 or below."
    )
