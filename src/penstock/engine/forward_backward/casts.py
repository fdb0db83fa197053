"""Casts to the compute dtype."""

import functools
from collections.abc import Callable, Set
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock.runtime.modes import user_mode

# ----------------------------------------------------------------------------------------------------------------------
# Patched attributes of single objects, until they are removed.
#
# No class is patched: Python, torch and pickle look up these attributes in the object first.
# ----------------------------------------------------------------------------------------------------------------------


_MISSING = object()


class _AttributePatch(NamedTuple):
    owner: Any
    name: str
    value: object
    before: object

    def withdraw(self, own: dict[str, Any]) -> None:
        """Restore the attribute, unless the user has replaced it since."""
        if own.get(self.name) is not self.value:
            return
        if self.before is _MISSING:
            del own[self.name]
        else:
            own[self.name] = self.before


class AttributePatches:
    """Attributes that were set on objects of the user, with their values from before."""

    def __init__(self) -> None:
        self._placed: dict[int, list[_AttributePatch]] = {}  # by the object's identity; the patch keeps it alive

    def plant(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of one object."""
        own = vars(owner)
        placed = _AttributePatch(owner, name, value, own.get(name, _MISSING))
        self._placed.setdefault(id(owner), []).append(placed)
        own[name] = value

    def remove(self) -> None:
        """Restore all objects."""
        for of_owner in self._placed.values():
            for placed in reversed(of_owner):
                placed.withdraw(vars(placed.owner))
        self._placed.clear()

    def clean(self, owner: object, state: dict[str, Any]) -> None:
        """Remove the patches from a copy of an object's attributes."""
        for placed in reversed(self._placed.get(id(owner), [])):
            placed.withdraw(state)


# ----------------------------------------------------------------------------------------------------------------------
# Casts of floating-point inputs to the compute dtype.
#
# model   inputs of the outermost call, whatever it is given.
# units   inputs of each block as well, as FSDP2's `cast_forward_inputs` does: an fp32 result of an fp32 buffer goes no
#         further.
# layers  inputs of torch's own layers that refuse mixed dtypes, wherever they stand: no working model changes. The same
#         holds for products in modules with fp32 buffers: an attention's table of decays makes its scores fp32, and
#         torch refuses the product of scores and values.
# ----------------------------------------------------------------------------------------------------------------------


CastMode = Literal["units", "model", "none"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

#: Layers that take inputs in the dtype of their weights alone. `nn.RMSNorm` and batch norms with statistics compute
#: with mixed dtypes, and other modules may want to.
STRICT_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.PReLU,
    nn.EmbeddingBag,
    nn.RNN,
    nn.LSTM,
    nn.GRU,
    nn.RNNCell,
    nn.LSTMCell,
    nn.GRUCell,
    nn.MultiheadAttention,
)


#: Products whose factors must have one dtype.
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, torch.einsum, F.linear)


def fits(value: Any, dtype: torch.dtype) -> bool:
    """Return True if there is nothing to cast in nested containers, as pytree knows them.

    Floats of 8 bits are codes and are never cast.
    """
    if isinstance(value, Tensor):
        return value.dtype == dtype or not value.is_floating_point() or value.dtype.itemsize == 1
    fit = True
    for leaf in tree_leaves(value):
        fit = fit and (not isinstance(leaf, Tensor) or fits(leaf, dtype))
    return fit


def all_fit(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Return True if there is nothing to cast in the inputs of a call."""
    fit = True
    for value in (*args, *kwargs.values()) if kwargs else args:
        fit = fit and (value is None or fits(value, dtype))
    return fit


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in nested containers to `dtype`.

    A container in which nothing is cast stays the same object: a model fills caches that belong to the caller. A tensor
    that occurs twice is cast once: attention checks if its inputs are the same object.
    """
    cast: dict[int, Tensor] = {}

    def changed(leaf: Any) -> Any:
        if fits(leaf, dtype):
            return leaf
        if id(leaf) not in cast:
            cast[id(leaf)] = leaf.to(dtype)
        return cast[id(leaf)]

    return tree_map(changed, value, is_leaf=functools.partial(fits, dtype=dtype))


class InputCasts:
    """Casts the inputs of modules.

    Under autocast only those of the outermost call are cast, because torch casts the inputs of each operation.

    Arguments:
        dtype: the compute dtype.
        mode: "units" for the outermost call, blocks, and layers that would fail; "model" for the outermost call alone.
        blocks: the modules of units.
        device: the compute device.
    """

    def __init__(self, dtype: torch.dtype, mode: CastMode, blocks: Set[nn.Module], device: torch.device) -> None:
        self._dtype = dtype
        self._of_calls = mode != "none" and dtype != torch.float32
        self._of_layers = mode == "units" and dtype != torch.float32
        self._blocks = blocks if self._of_layers else frozenset()
        self._device_type = device.type

    def of_call(self, module: nn.Module, inputs: Inputs, *, outermost: bool) -> Inputs | None:
        """Cast the inputs of a call of a module; return `None` if they stay as they are."""
        of_outermost = outermost and self._of_calls
        if not (of_outermost or module in self._blocks) or all_fit(*inputs, self._dtype):
            return None
        with user_mode():  # autograd records the cast
            if not outermost and torch.is_autocast_enabled(self._device_type):
                return None
            cast: Inputs = cast_floating(inputs, self._dtype)
        return cast

    def of_layer(self, module: nn.Module) -> "LayerCast | None":
        """Make the cast of a layer that refuses inputs of another dtype than its weights; `None` for other layers."""
        forward = type(module).forward
        if not self._of_layers or not any(forward is layer.forward for layer in STRICT_LAYERS):
            return None
        return LayerCast(self._dtype, self._device_type, masks=forward is nn.MultiheadAttention.forward)

    def let_products_mix(self, model: nn.Module, patches: AttributePatches) -> None:
        """Let submodules multiply fp32 results of their buffers with values in the compute dtype."""
        for module in model.modules():
            if self._of_layers and module is not model and has_fp32_buffers(module):
                patches.plant(module, "forward", _with_products(module.forward, self._dtype, self._device_type))


class LayerCast:
    """Casts inputs that one of torch's own layers would refuse. A compiler may trace it.

    Arguments:
        dtype: the compute dtype. A layer whose weights have another dtype, always or because its parent converts them
            for each forward (routers do), gets its inputs as they are.
        device_type: the type of the compute device.
        masks: True for attention, whose masks may have another dtype if it returns no weights.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, *, masks: bool) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._masks = masks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Return the cast inputs; `None` if they stay as they are."""
        if all_fit(args, kwargs, self._dtype):
            return None
        fit = False
        for parameter in module._parameters.values():
            fit = fit or (parameter is not None and parameter.dtype != self._dtype)
        if fit or torch.is_autocast_enabled(self._device_type) or (self._masks and self._takes(*args, **kwargs)):
            return None
        cast: Inputs = cast_floating((args, kwargs), self._dtype)
        return cast

    def _takes(
        self, query: Tensor, key: Tensor, value: Tensor, _: Any = None, need_weights: bool = True, *__: Any, **___: Any
    ) -> bool:
        return not need_weights and fits((query, key, value), self._dtype)


def has_fp32_buffers(module: nn.Module) -> bool:
    """Return True if a module itself has fp32 buffers that are no running statistics."""
    own = [buffer for buffer in module.buffers(recurse=False) if buffer.dtype == torch.float32 and buffer.ndim > 0]
    return bool(own) and getattr(module, "running_mean", None) is None


def _with_products(forward: Callable[..., Any], dtype: torch.dtype, device_type: str) -> Callable[..., Any]:
    """Wrap a module's forward. If its first run mixes no dtypes, later runs are not watched."""
    needed: bool | None = None  # not known before it has run

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal needed
        if needed is False or torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type):
            return forward(*args, **kwargs)
        with _Products(dtype) as products:
            output = forward(*args, **kwargs)
        needed = needed or products.mixed
        return output

    return run


class _Products(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.mixed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS:
            dtypes = {factor.dtype for factor in args if isinstance(factor, Tensor)}
            if dtypes == {torch.float32, self._dtype}:
                self.mixed = True
                args = cast_floating(args, self._dtype)
        return func(*args, **(kwargs or {}))
