"""What a run computes in."""

from typing import Any, Literal, cast

import torch

Precision = Literal["fp32", "bf16", "fp16"]

# bf16 products without one of these are emulated, many times slower than fp32.
_CPU_BF16 = ("avx512_bf16", "amx_bf16")


def resolve_precision(wanted: str, device: torch.device) -> Precision:
    """Choose the precision asked for; for "auto", bf16 where the device multiplies matrices in it, else fp32."""
    if wanted != "auto":
        return cast("Precision", wanted)
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # get_capabilities is newer than the oldest torch we support.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(name, False) for name in _CPU_BF16) else "fp32"
