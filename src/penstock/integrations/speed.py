"""How much of the device's speed the model's own arithmetic uses: model FLOPs utilisation (MFU)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Dense FLOP/s of one device, by what its name holds: of bf16, fp16 and fp32 products; `None` where it has no such
#: units. fp32 is without TF32, torch's default. The first that fits is taken.
PEAKS: Mapping[str, tuple[float | None, float | None, float | None]] = {
    # HGX B200 data sheet: 36 PFLOPS of fp16/bf16 with sparsity and 600 TFLOPS of fp32, of 8 GPUs.
    r"\bB200\b": (2.25e15, 2.25e15, 75e12),
    # H200 data sheet: 1,671 (NVL) and 1,979 (SXM) TFLOPS with sparsity.
    r"\bH200 NVL\b": (835.5e12, 835.5e12, 60e12),
    r"\bH200\b": (989.5e12, 989.5e12, 67e12),
    # H100 data sheet: 1,671 (NVL), 1,513 (PCIe) and 1,979 (SXM) TFLOPS with sparsity. The SXM's name is its memory's.
    r"\bH100 NVL\b": (835.5e12, 835.5e12, 60e12),
    r"\bH100 PCIe\b": (756.5e12, 756.5e12, 51e12),
    r"\bH100 (80GB HBM3|SXM)": (989.5e12, 989.5e12, 67e12),
    # A100 data sheet, SXM and PCIe alike.
    r"\bA100\b": (312e12, 312e12, 19.5e12),
    # L40S data sheet: 362.05 TFLOPS without sparsity.
    r"\bL40S\b": (362.05e12, 362.05e12, 91.6e12),
    # L4 data sheet: 242 TFLOPS with sparsity.
    r"\bL4\b": (121e12, 121e12, 30.3e12),
    # A10 data sheet: 125 TFLOPS without sparsity.
    r"\bA10\b": (125e12, 125e12, 31.2e12),
    # NVIDIA RTX Blackwell architecture white paper, sums in fp32, which torch's are.
    r"\bRTX 5090$": (209.5e12, 209.5e12, 104.8e12),
    # NVIDIA Ada architecture white paper, sums in fp32.
    r"\bRTX 4090$": (165.2e12, 165.2e12, 82.6e12),
    # NVIDIA Ampere GA102 architecture white paper, sums in fp32.
    r"\bRTX 3090$": (71e12, 71e12, 35.6e12),
    # V100 data sheet: V100S, PCIe, SXM2. It has no bf16.
    r"\bV100S\b": (None, 130e12, 16.4e12),
    r"\bV100-PCIE\b": (None, 112e12, 14e12),
    r"\bV100\b": (None, 125e12, 15.7e12),
    # T4 data sheet. It has no bf16.
    r"\bT4\b": (None, 65e12, 8.1e12),
    # AMD Instinct MI300X data sheet, without sparsity.
    r"\bMI300X\b": (1307.4e12, 1307.4e12, 163.4e12),
    # AMD Instinct MI250X data sheet: 383 and 95.7 (matrices) TFLOPS of two dies, each of which is a device.
    r"\bMI250X\b": (191.5e12, 191.5e12, 47.85e12),
}
_COLUMNS = ("bf16", "fp16", "fp32")


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
    """Look up the dense FLOP/s of a device.

    Arguments:
        device_name: as torch calls it: `"NVIDIA H100 PCIe"`.
        precision: of the products: `"bf16"`, `"fp16"` or `"fp32"`.

    Returns:
        `None` for one that is not known, for a slice of one, and for a precision that it only emulates.
    """
    if " MIG " in device_name:
        return None
    found = (peaks for pattern, peaks in PEAKS.items() if re.search(pattern, device_name))
    return next(found, (None, None, None))[_COLUMNS.index(precision)]


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
