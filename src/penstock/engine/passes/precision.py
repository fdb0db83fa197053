"""The compute dtype at the borders of modules: whose floating-point inputs are cast to it.

model   the outermost call, whatever it is given.
units   each block as well, as FSDP2's `cast_forward_inputs` does: an fp32 buffer that took part before goes no further.
layers  torch's own layers that refuse to mix dtypes, wherever they stand: nothing that worked works otherwise. Products
        that a module makes of its own fp32 buffers are such a place too (`mixing`).
"""

from collections.abc import Set
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.engine.passes.containers import replace_tensors
from penstock.engine.passes.mixing import MixedProducts, mixes

CastMode = Literal["units", "model", "none"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

#: Layers that take their inputs in the dtype of their weights and no other. `nn.RMSNorm` and batch norms with
#: statistics compute with mixed ones, and modules that people write may want to.
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


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in nested containers to `dtype`; everything else stays as it is."""
    return replace_tensors(value, lambda tensor: tensor if is_fit(tensor, dtype) else tensor.to(dtype))


def is_fit(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is nothing to cast. Floats of 8 bits are codes, no numbers to compute with."""
    return tensor.dtype == dtype or not tensor.is_floating_point() or tensor.dtype.itemsize == 1


class InputCasts:
    """Whose inputs are cast.

    Under autocast only those of the outermost call are: there torch casts, operation by operation.

    Arguments:
        dtype: the compute dtype.
        mode: "units" for the outermost call, blocks, and layers that would fail; "model" for the outermost call alone.
        blocks: the modules of units.
        device: where they compute.
    """

    def __init__(self, dtype: torch.dtype, mode: CastMode, blocks: Set[nn.Module], device: torch.device) -> None:
        self._dtype = dtype
        self._of_calls = mode != "none" and dtype != torch.float32
        self._blocks = blocks if mode == "units" and dtype != torch.float32 else frozenset()
        self._of_layers = mode == "units" and dtype != torch.float32
        self._device = device

    def concern(self, module: nn.Module, *, outermost: bool) -> bool:
        """Whether the inputs of a forward of the module may have to be cast."""
        return module in self._blocks or (outermost and self._of_calls)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, outermost: bool) -> Inputs | None:
        """Cast the inputs of a call that is concerned; return `None` where they stay as they are."""
        if not any(self._may_change(value) for value in (*args, *kwargs.values())):
            return None
        if not outermost and torch.is_autocast_enabled(self._device.type):
            return None
        cast: Inputs = cast_floating((args, kwargs), self._dtype)
        return None if cast[0] is args and cast[1] is kwargs else cast

    def where_products_mix(self, model: nn.Module) -> list[MixedProducts]:
        """Let modules below the model multiply buffers in fp32 with values in the compute dtype."""
        if not self._of_layers:
            return []
        inner = [module for module in model.modules() if module is not model and mixes(module, self._dtype)]
        return [MixedProducts(module, self._dtype, self._device) for module in inner]

    def _may_change(self, value: Any) -> bool:
        """Whether it is worth a look: most calls have a tensor or two that fit."""
        if isinstance(value, Tensor):
            return not is_fit(value, self._dtype)
        return not (value is None or isinstance(value, bool | int | float | str))

    def of_layer(self, module: nn.Module) -> "LayerCast | None":
        """Make the cast for a layer that refuses inputs of another dtype than its weights; `None` for other layers."""
        forward = type(module).forward
        if not self._of_layers or not any(forward is layer.forward for layer in STRICT_LAYERS):
            return None
        return LayerCast(self._dtype, self._device.type, masks=forward is nn.MultiheadAttention.forward)


class LayerCast:
    """Casts what one of torch's own layers would refuse. A compiler may trace it.

    Arguments:
        dtype: compute dtype. A layer whose weights have another one, for good or because its parent makes them fp32 for
            each forward (routers do), gets its inputs as they are.
        device_type: where it computes.
        masks: whether it is attention, whose masks may be in another dtype where it returns no weights.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, *, masks: bool) -> None:
        self._dtype = dtype
        self._device_type = device_type
        self._masks = masks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """The inputs to take instead; `None` for the same."""
        fit = True
        for value in (*args, *kwargs.values()) if kwargs else args:
            fit = fit and self.fits(value)
        if fit:
            return None
        for parameter in module._parameters.values():
            fit = fit or (parameter is not None and parameter.dtype != self._dtype)
        if fit or torch.is_autocast_enabled(self._device_type) or (self._masks and self._takes(*args, **kwargs)):
            return None
        done: list[tuple[Tensor, Tensor]] = []  # attention asks whether its inputs are one and the same
        return tuple(self._cast(value, done) for value in args), {k: self._cast(v, done) for k, v in kwargs.items()}

    def fits(self, value: Any) -> bool:
        """Whether there is nothing to cast."""
        if isinstance(value, Tensor):
            return is_fit(value, self._dtype)
        if isinstance(value, tuple | list):  # states of a recurrent layer, and packed sequences
            for item in value:
                if not self.fits(item):
                    return False
        return True

    def _takes(
        self, query: Tensor, key: Tensor, value: Tensor, _: Any = None, need_weights: bool = True, *__: Any, **___: Any
    ) -> bool:
        return not need_weights and self.fits(query) and self.fits(key) and self.fits(value)

    def _cast(self, value: Any, done: list[tuple[Tensor, Tensor]]) -> Any:
        if not isinstance(value, Tensor):
            return value if self.fits(value) else cast_floating(value, self._dtype)
        if self.fits(value):
            return value
        for old, new in done:
            if old is value:
                return new
        done.append((value, value.to(self._dtype)))
        return done[-1][1]
