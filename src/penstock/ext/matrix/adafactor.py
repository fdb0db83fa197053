"""The rule of `torch.optim.Adafactor`: its arithmetic on one parameter, and its options."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.ext.matrix.whole import Whole
from penstock.rules.storage import StateFormat

OPTIONS = frozenset(("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"))


class AdafactorRule:
    """Adafactor's arithmetic, a `MatrixRule`: second moments as an outer product of sums of rows and columns.

    The operations are those of `torch/optim/_adafactor.py`, one by one, after N. Shazeer and M. Stern, "Adafactor:
    Adaptive Learning Rates with Sublinear Memory Cost", 2018, https://arxiv.org/abs/1804.04235.
    """

    def states(self, shape: tuple[int, ...], group: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Name the factors of the last two dimensions: [..., rows, 1] and [..., 1, columns]; of a vector, all of it."""
        del group
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def update(
        self, matrix: Tensor, grad: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any], step: int
    ) -> None:
        """Update a parameter; see `MatrixRule.update`."""
        lr, (eps1, eps2) = group["lr"], group["eps"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        eps1 = torch.finfo(matrix.dtype).eps if eps1 is None else eps1
        grad = -grad if group["maximize"] else grad
        weight = float(step) ** group["beta2_decay"]  # 1 - beta2 of this step
        size = max(eps2, matrix.norm(2).item() / matrix.numel() ** 0.5)
        if group["weight_decay"] != 0:
            matrix.mul_(1 - lr * group["weight_decay"])
        if grad.dim() > 1:
            rows, columns = states["row_var"], states["col_var"]
            rows.lerp_(_mean_square(grad, -1), weight)
            columns.lerp_(_mean_square(grad, -2), weight)
            update = (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            update = states["variance"].lerp_(grad * grad, weight).clone()
        update = update.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        clip = max(1.0, update.norm(2).item() / (update.numel() ** 0.5 * group["d"]))
        matrix.add_(update, alpha=-size * min(lr, 1 / step**0.5) / clip)

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of three fp32 tensors of the shape."""
        return 12 * torch.Size(shape).numel()


def _mean_square(grad: Tensor, dim: int) -> Tensor:
    """Return the mean of the squares along a dimension, which is kept, without a tensor of all squares."""
    norm: Tensor = torch.norm(grad, dim=dim, keepdim=True)
    return norm.square_().div_(grad.size(dim))


def adafactor(optimizer: torch.optim.Optimizer, format_: StateFormat) -> Whole:
    """Make the rule of `torch.optim.Adafactor`.

    Raises:
        ConfigError: 8-bit states, or an option of a newer version that is on.
    """
    if format_.dtype == "int8":
        raise ConfigError(
            "Options(state_dtype='int8') is not for Adafactor, whose states are small already. Use 'fp32' or 'bf16'."
        )

    def check(group: Mapping[str, Any]) -> None:
        """Refuse what the arithmetic does not know."""
        for option in sorted(optimizer.defaults.keys() - OPTIONS):
            if group.get(option):
                raise ConfigError(
                    f"{option}={group[option]!r} is an option of this version of torch.optim.Adafactor that Penstock "
                    f"does not know. Set {option} to None or False in every parameter group."
                )

    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    return Whole("adafactor", "torch.optim.Adafactor", AdafactorRule(), format_, shapes, check=check)
