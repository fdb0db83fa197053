"""Frozen linear layers in 8 bits: a code for each weight, a scale for each row of them.

    weight  int8 (out, in)    weight_scale  bf16 (out,)    W = weight * weight_scale[:, None]

Both are plain frozen parameters, which the engine shards, places and gathers as they are. A code has 7 bits and a scale
8, so their product has no rounding but the last, to the dtype of the input.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from penstock.integrations.engine_internals import SCALE_DTYPE, codes_of, decoded, scales_of


class Int8Linear(nn.Linear):
    """A frozen linear layer whose weight is int8 codes and a scale for each output.

    Arguments:
        in_features: width of the input.
        out_features: width of the output.
        bias: the layer's own, which stays as it is.
        device: of codes and scales, which hold nothing yet.
    """

    weight_scale: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, device: torch.device | str
    ) -> None:
        nn.Module.__init__(self)  # that of Linear would draw a weight
        self.in_features, self.out_features = in_features, out_features
        codes = torch.empty((out_features, in_features), dtype=torch.int8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scale = torch.empty(out_features, dtype=SCALE_DTYPE, device=device)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Compute W x + b: (..., in) to (..., out), in the dtype of the input."""
        made: Tensor = _Product.apply(input, self.weight, self.weight_scale, self.bias)  # type: ignore[no-untyped-call]
        return made


class _Product(torch.autograd.Function):
    """Input (..., in) times the decoded weight (out, in), of which autograd keeps the codes alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        # Without a function of its own autograd would keep each decoded weight until backward: the whole model.
        ctx.save_for_backward(codes, scale)
        return F.linear(input, decoded(codes, scale, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        of_input, _, _, of_bias = ctx.needs_input_grad
        grad_input = grad @ decoded(codes, scale, grad.dtype) if of_input else None
        grad_bias = grad.flatten(0, -2).sum(0) if of_bias else None
        return grad_input, None, None, grad_bias


def quantise_linears(model: nn.Module) -> None:
    """Make every linear layer but the head an `Int8Linear`, in place; before adapters are added.

    Layers on the meta device stay there: `LoraWeights` makes their codes of a folder's values.

    Arguments:
        model: a transformers model.

    Raises:
        ConfigError: there is none, or a layer holds a value that is not finite.
    """
    of_model: Any = model
    head = of_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    if not layers:
        raise ConfigError(
            f"base=int8: {type(model).__name__} has no torch.nn.Linear beside its head. Use base=auto, which streams "
            "it as it is."
        )
    made: dict[nn.Module, Int8Linear] = {}  # a layer in two places stays one
    for name, layer in layers.items():
        if layer not in made:
            made[layer] = _quantised(name, layer)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in made:
                setattr(parent, key, made[child])


def _quantised(name: str, layer: nn.Linear) -> Int8Linear:
    """Make the quantised layer of one, with its values where it has some."""
    made = Int8Linear(layer.in_features, layer.out_features, layer.bias, layer.weight.device)
    if not layer.weight.is_meta:
        weight = layer.weight.detach()
        try:
            made.weight_scale.data = scales_of(weight)
        except ConfigError as error:
            raise ConfigError(f"base=int8: '{name}.weight' {error}. Train it with base=auto.") from error
        made.weight.data = codes_of(weight, made.weight_scale)
    return made.train(layer.training)
