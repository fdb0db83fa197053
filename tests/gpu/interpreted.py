"""Triton's interpreter with the roundings of a GPU: it computes `tl.fma` in two steps, and its bf16 loses denormals.

With `TRITON_INTERPRET=1` it runs Inductor's kernels on the host, with real values and without a GPU: slowly.
"""

from typing import Any

import torch

from penstock.rules import exact

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def round_as_a_gpu() -> None:
    """Have the interpreter round as a GPU does, from now on."""
    import numpy as np
    from triton.runtime import interpreter

    def fma(self: Any, *operands: Any) -> Any:
        shape = np.broadcast_shapes(*(operand.data.shape for operand in operands))
        a, b, c = (torch.tensor(np.broadcast_to(operand.data, shape)) for operand in operands)
        assert a.dtype == torch.float32
        return interpreter.TensorHandle(exact.fma(a, b, c).numpy(), operands[2].dtype.scalar)

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        words = np.frombuffer(values.tobytes(), dtype=f"int{source.primitive_bitwidth}").copy()
        converted = torch.from_numpy(words).view(_DTYPES[str(source)]).to(_DTYPES[str(target)])
        bits = converted.view(torch.int16 if target.primitive_bitwidth == 16 else torch.int32).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)

    interpreter.InterpreterBuilder.create_fma = fma
    interpreter._convert_float = convert
