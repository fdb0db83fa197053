"""How much of the device's speed the model's own arithmetic uses: model FLOPs utilisation (MFU)."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.planner.machine import gpus


@dataclass(frozen=True)
class Speed:
    """What a token costs, and what the device can do.

    Attributes:
        flops_per_token: of forward and backward, see `flops_per_token`.
        peak_flops: dense FLOP/s of one rank's device.
    """

    flops_per_token: float
    peak_flops: float

    def mfu(self, tokens_per_second: float, *, world_size: int) -> float:
        """Divide the model's FLOP/s by what the devices of all ranks can do.

        Arguments:
            tokens_per_second: of all ranks together, tokens of padding not counted.
            world_size: ranks, each with a device.

        Source: PaLM (Chowdhery et al., 2022), appendix B. What is recomputed in backward is not useful, nor counted.
        """
        return tokens_per_second * self.flops_per_token / (self.peak_flops * world_size)


def flops_per_token(model: nn.Module, *, seq_length: int) -> float:
    """Count the floating-point operations of the model's products for a token, in forward and backward together.

    6 T + 4 F + 12 L H T_s: a trained weight takes part in a product of forward (2 operations) and in two of backward,
    for the gradients of activations and of itself (4); a frozen one, as beneath adapters, in the first two. Attention
    in L layers of H = heads x head size takes 12 L H T_s at a sequence length T_s; every token counts as if it saw
    all of the sequence, as is usual, which packed documents do not. Embeddings look up, and are not counted; a tied
    head is. Of a mixture's experts those are counted that a token sees.

    Arguments:
        model: a transformers model, as it was built or prepared, with adapters or without.
        seq_length: tokens of a sequence.

    Source: PaLM (Chowdhery et al., 2022), appendix B; the rule of 6 is of Kaplan et al. (2020), section 2.1.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    trained = frozen = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        active = _active_share(config) if "experts" in name.split(".") else 1.0
        weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
        trained += active * sum(weight.numel() for weight in weights if weight.requires_grad)
        frozen += active * sum(weight.numel() for weight in weights if not weight.requires_grad)
        if not weights and not list(module.children()):
            frozen += active * _packed_numel(module)
    return 6 * trained + 4 * frozen + 12 * _attention_width(config) * seq_length


def peak_flops(device_name: str, precision: str) -> float | None:
    """Look up the dense FLOP/s of a device, in the files of GPUs that machines are made of.

    Arguments:
        device_name: as torch calls it: `"NVIDIA H100 PCIe"`.
        precision: of the products: `"bf16"`, `"fp16"` or `"fp32"`.

    Returns:
        `None` for one that is not known, for a slice of one, and for a precision that it only emulates.
    """
    if " MIG " in device_name:
        return None
    found = next((gpu for gpu in gpus() if re.search(gpu["match"], device_name)), {})
    return found.get({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]) or None


def device_name(device: torch.device) -> str:
    """Name a device as its maker does; empty for a cpu, and where torch does not say."""
    if device.type == "cpu":
        return ""
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else ""


def _active_share(config: Any) -> float:
    """Say which share of a mixture's experts a token sees; 1 where the configuration does not say."""
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    seen = _number(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    return min(1.0, seen / experts) if experts and seen else 1.0


def _attention_width(config: Any) -> int:
    """Multiply layers, heads and head size; 0 where the configuration does not say."""
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    return _number(config, "num_hidden_layers") * (heads * _number(config, "head_dim") or hidden)


def _number(config: Any, *names: str) -> int:
    """Read the first of these that a configuration has as a number; 0 without one."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _packed_numel(module: nn.Module) -> int:
    """Count the weights of a layer that keeps them packed, as quantised ones do: no parameter has their shape."""
    sizes = (getattr(module, "in_features", 0), getattr(module, "out_features", 0))
    return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else 0
