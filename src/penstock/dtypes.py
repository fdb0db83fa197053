"""The dtypes that a precision stands for."""

from collections.abc import Mapping

import torch

COMPUTE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
