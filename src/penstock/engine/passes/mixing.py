"""Modules that multiply buffers in fp32 with what they compute in the compute dtype, which torch refuses.

An attention's table of decays makes its scores fp32, and the product of scores and values fails; `model.bfloat16()`
would have rounded the table. Buffers keep their dtype here, so it is the product that is taken in the compute dtype.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.engine.passes.planted import Planted

#: Products, and how many of their first arguments have to agree in dtype; torch refuses all mixtures of these.
PRODUCTS: dict[Callable[..., Any], int] = {
    torch.matmul: 2,
    Tensor.matmul: 2,
    Tensor.__matmul__: 2,
    Tensor.__rmatmul__: 2,
    torch.bmm: 2,
    Tensor.bmm: 2,
    torch.mm: 2,
    Tensor.mm: 2,
    torch.mv: 2,
    Tensor.mv: 2,
    torch.addmm: 3,
    torch.baddbmm: 3,
    F.linear: 3,
    F.scaled_dot_product_attention: 3,
}


def mixes(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module may mix dtypes: it has floating-point buffers in another one, and they are no statistics."""
    if getattr(module, "running_mean", None) is not None:
        return False
    own = [buffer for buffer in module.buffers(recurse=False) if buffer.is_floating_point() and buffer.ndim > 0]
    return any(buffer.dtype != dtype and buffer.dtype.itemsize > 1 for buffer in own)


class MixedProducts:
    """The forward of such a module. One that mixes nothing the first time runs as it is from then on.

    Arguments:
        module: the module, which has this forward until `remove`.
        dtype: the compute dtype.
        device: where it computes.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._planted = Planted()
        self._dtype = dtype
        self._device_type = device.type
        self._forward = module.forward
        self._mixes: bool | None = None  # not known before it has run

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._planted.plant(module, "forward", forward)

    def remove(self) -> None:
        """Give the module its own forward back."""
        self._planted.remove()

    def clean(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Take what is ours out of a copy of a module's attributes."""
        self._planted.clean(module, state)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._mixes is False or torch.compiler.is_compiling() or torch.is_autocast_enabled(self._device_type):
            return self._forward(*args, **kwargs)
        products = _Products(self._dtype)
        with products:
            output = self._forward(*args, **kwargs)
        self._mixes = self._mixes or products.mixed
        return output


class _Products(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.mixed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        count = PRODUCTS.get(func, 0)
        if count:
            args = self._agreed(args, count)
        elif func is torch.einsum:
            operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            args = (args[0], *self._agreed(tuple(operands), len(operands)))
        return func(*args, **(kwargs or {}))

    def _agreed(self, args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        """Cast the first arguments of a product to the compute dtype where they are of that dtype and others."""
        dtypes = {value.dtype for value in args[:count] if isinstance(value, Tensor) and value.is_floating_point()}
        if len(dtypes) < 2 or self._dtype not in dtypes or any(dtype.itemsize == 1 for dtype in dtypes):
            return args
        self.mixed = True
        cast = [v.to(self._dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in args[:count]]
        return (*cast, *args[count:])
