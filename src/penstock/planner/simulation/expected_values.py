"""Expected values of fake tensors, as far as routing to experts needs them: the sizes of what a mask chooses.

Which rows go to an expert depends on values. How many do is known on average: indices that `topk` returns are taken
to be equally likely. What is made of them is followed as a mean: of a mask, it is the share of ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.planner.simulation.fake_tensor import ByStorage, Shaped, is_fake

aten = torch.ops.aten


class Indices(NamedTuple):
    """Numbers from 0 up to, and without, a bound, each as likely."""

    bound: int


class Mean(NamedTuple):
    """Numbers of which the mean is known, such as a mask's share of ones."""

    value: float


class ExpectedValues:
    """What is known of the values of fake tensors, by storage.

    Arguments:
        make: makes a fake tensor.
        refusal: makes the error of an operation.
        share: of ones in masks of which nothing is known; `None` where that is an error.
    """

    def __init__(
        self, make: Callable[[Shaped], Tensor], refusal: Callable[[Any, str], Exception], share: float | None
    ) -> None:
        self._make = make
        self._refusal = refusal
        self._share = share
        self._known: ByStorage[Indices | Mean] = ByStorage()

    def follow(self, name: str, args: Sequence[Any], out: Any, written: Iterable[Any]) -> None:
        """Note what an operation that was not run makes known; forget what it overwrites.

        Arguments:
            name: of the operation.
            args: of the operation.
            out: what it returns.
            written: the arguments that it writes.
        """
        made = out if isinstance(out, tuple) else (out,)
        known = self._made_known(name, args, made[-1]) if args and isinstance(args[0], Tensor) else None
        for target in written:
            if isinstance(target, Tensor):
                self._known.put(target, None)
        if known is not None:
            for tensor in made if name == "aminmax" else made[-1:]:  # `topk` returns indices behind values
                self._known.put(tensor, known)

    def _made_known(self, name: str, args: Sequence[Any], out: Any) -> Indices | Mean | None:
        known = self._known.get(args[2] if name in ("scatter", "scatter_") else args[0])
        if known is None and name not in ("topk", "argmax"):
            return None
        match name, known:
            case "topk", _:
                return Indices(args[0].shape[args[2] if len(args) > 2 else -1])
            case "argmax", _ if len(args) > 1 and args[1] is not None:
                return Indices(args[0].shape[args[1]])
            case (("clone" | "_to_copy" | "index"), _):
                return known
            case (("aminmax" | "min" | "max"), Indices(bound)) if len(args) == 1:
                return Mean(bound - 1)  # `one_hot` asks whether these are within their bound
            case "eq", Indices(bound):
                return Mean(1 / bound)
            case (("scatter" | "scatter_"), Indices(bound)) if not isinstance(args[3], Tensor) and args[3] == 1:
                return Mean(min(args[2].shape[args[1]] / bound, 1.0))  # put among zeros, along a row
            case (("sum" | "any"), Mean(value)):
                count = value * args[0].numel() / max(out.numel(), 1)
                return Mean(count if name == "sum" else min(count, 1.0))
            case (("gt" | "ne"), Mean(value)) if not isinstance(args[1], Tensor) and args[1] == 0:
                return Mean(min(value, 1.0))
        return None

    def settle(self, func: Any, args: Sequence[Any]) -> Any:
        """Return what an operation would whose result depends on values.

        Raises:
            ConfigError: nothing is known of these.
        """
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            known = self._known.get(args[0])
            if not isinstance(known, Mean) or args[0].is_floating_point():
                raise self._refusal(func, "reads a value, and a simulation has none")
            return bool(round(known.value)) if args[0].dtype == torch.bool else round(known.value)
        if packet is aten.nonzero:
            (mask,) = args
            count = self._ones(func, mask)
            if count == mask.numel():
                return torch.nonzero(torch.ones(mask.shape, dtype=torch.bool))
            return self._make(Shaped((count, mask.dim()), (1, max(count, 1)), torch.int64))
        raise self._refusal(func, "returns what depends on values, and a simulation has none")

    def indices(self, func: Any, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices in place of masks: one for each dimension of a mask.

        Raises:
            ConfigError: nothing is known of a mask.
        """
        found: list[Tensor | None] = []
        for index in given:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            else:
                rows = Shaped((self._ones(func, index),), (1,), torch.int64)
                found += (self._make(rows) for _ in range(index.dim()))
        return found

    def _ones(self, func: Any, mask: Tensor) -> int:
        """Count the ones in a mask, on average."""
        if not is_fake(mask):
            return int(torch.count_nonzero(mask))
        known = self._known.get(mask)
        share = known.value if isinstance(known, Mean) else self._share
        if share is None:
            raise self._refusal(func, "counts what a mask chooses, and a simulation has no values")
        return round(share * mask.numel())
