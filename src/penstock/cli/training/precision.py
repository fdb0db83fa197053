"""Which compute dtype `--precision auto` is."""

from typing import Any, Literal

import torch

# bf16 products without one of these are emulated, many times slower than fp32.
_CPU_BF16 = ("avx512_bf16", "amx_bf16")


def resolve_precision(wanted: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """The precision asked for; for "auto", bf16 where the device's matrix products are made in it, else fp32."""
    if wanted != "auto":
        return "bf16" if wanted == "bf16" else "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # get_capabilities is newer than the oldest torch we support.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(name, False) for name in _CPU_BF16) else "fp32"
