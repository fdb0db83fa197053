"""A transformer's block, to run once for real what the figures of its parts say."""

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_NUMEL = 64


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and beside a residual, as in Llama.

    Arguments:
        hidden: the width, a multiple of 64.
        device: where the weights are.
        dtype: their dtype, and that of compute.
    """

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._heads = hidden // HEAD_NUMEL
        self.attention_norm, self.norm = (_filled((hidden,), 1.0, device, dtype) for _ in range(2))
        self.qkv = _filled((3 * hidden, hidden), None, device, dtype)
        self.out = _filled((hidden, hidden), None, device, dtype)
        self.gate, self.up = (_filled((4 * hidden, hidden), None, device, dtype) for _ in range(2))
        self.down = _filled((hidden, 4 * hidden), None, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output, of the input's shape, [batch, tokens, hidden]."""
        batch, tokens, hidden = x.shape
        normed = functional.rms_norm(x, (hidden,), self.attention_norm)
        qkv = functional.linear(normed, self.qkv).view(batch, tokens, 3, self._heads, HEAD_NUMEL)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + functional.linear(attended.transpose(1, 2).reshape(x.shape), self.out)
        normed = functional.rms_norm(x, (hidden,), self.norm)
        gated = functional.silu(functional.linear(normed, self.gate)) * functional.linear(normed, self.up)
        return x + functional.linear(gated, self.down)

    def flops(self, batch: int, tokens: int) -> int:
        """Count the additions and multiplications of the matrix products, forward and backward."""
        hidden = self.out.shape[0]
        products = 2 * batch * tokens * sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)
        attention = 4 * batch * tokens * tokens * hidden  # the half that the mask leaves out is not skipped everywhere
        return 3 * (products + attention)


def _filled(shape: tuple[int, ...], value: float | None, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter of one value, or of normal ones."""
    if value is not None:
        return nn.Parameter(torch.full(shape, value, device=device, dtype=dtype))
    return nn.Parameter(normal(shape, device, dtype, scale=shape[1] ** -0.5))


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Make normal values, with a generator of our own: the user's random numbers stay as they are.

    Zeros would not do: a device draws less power for them, and runs faster than it would in training.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    numel = 1
    for size in shape:
        numel *= size
    few = torch.randn(min(numel, 1 << 16), generator=generator, device="cpu").mul_(scale).to(dtype)
    # A few values over and over: to draw all of them would take longer than what is measured with them.
    return few.repeat(-(-numel // few.numel()))[:numel].view(shape).to(device)
