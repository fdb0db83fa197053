"""How fast the device computes: matrix products, passes over its memory, and what one operation costs at least."""

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor

from penstock.probe.sampling import Case, Deadline, Figures, seconds_each, seconds_of, synchronize, take_turns
from penstock.runtime.hardware import free_device_memory

#: Tokens and width of the products, from small to large: a layer of a small model to one of a large one.
SHAPES = (
    *((64, 128), (128, 256), (256, 512), (256, 1024), (512, 1024), (1024, 2048)),
    *((2048, 4096), (4096, 4096), (8192, 4096), (8192, 8192)),
)
RUN_SECONDS = 0.03  # of products, about: the time around them is lost in that
LEAST_PASS_BYTES, MOST_PASS_BYTES = 32 << 20, 128 << 20  # of each tensor of an elementwise pass
TINY_OPS = 200
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def measure_passes(device: torch.device, deadline: Deadline) -> Figures:
    """Measure passes over the device's memory: `device_bandwidth`.

    Arguments:
        device: the one that computes.
        deadline: when to be done.
    """
    free = free_device_memory(device)
    nbytes = deadline.nbytes(LEAST_PASS_BYTES, MOST_PASS_BYTES)
    nbytes = nbytes if free is None else min(nbytes, free // 16)
    moved = [torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device) for _ in range(3)]
    add = partial(torch.add, moved[0], moved[1], out=moved[2])
    how = f"a sum of two tensors into a third, {nbytes >> 20} MiB each, read and written"
    return take_turns({"device_bandwidth": (lambda: 3 * nbytes / seconds_each(add, device), how)}, deadline)


def measure_arithmetic(device: torch.device, deadline: Deadline) -> Figures:
    """Measure what the device computes in a second.

    Arguments:
        device: the one that computes.
        deadline: when to be done.

    Returns:
        `flops_*`, `op_seconds` and `op_host_seconds`.
    """
    dtypes = [dtype for dtype in _DTYPES if device.type != "cpu" or dtype is not torch.float16]
    sizing = deadline.share(0.35)
    products = [Products(device, each, sizing.share(1 / (len(dtypes) - n))) for n, each in enumerate(dtypes)]
    cases: dict[str, Case] = {f"flops_{_DTYPES[each.dtype]}": (each.rate, each.how) for each in products}
    return take_turns(cases | _tiny_cases(device, products[0].compute), deadline)


class Products:
    """The three matrix products of a linear layer in training: its output, and both gradients.

    They are as large as it takes to measure them, of those that fit in the time and the memory. None is tried that
    would take too long: each is at most eight times as much work as the one before it.

    Arguments:
        device: where they are computed.
        dtype: what they are of.
        deadline: when the size is to be found.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, deadline: Deadline) -> None:
        self._device, self.dtype, free = device, dtype, free_device_memory(device)
        for tokens, hidden in SHAPES:  # the output is four times as wide as the input
            nbytes = 4 * dtype.itemsize * hidden * (3 * tokens + 4 * hidden)
            if free is not None and nbytes > free:
                break
            self._x = normal((tokens, hidden), device, dtype)
            self._weight = normal((4 * hidden, hidden), device, dtype, scale=hidden**-0.5)
            self._grad = normal((tokens, 4 * hidden), device, dtype)
            self.compute()  # the first one brings its memory, and may load a library
            seconds = min(seconds_of(self.compute, device) for _ in range(2))
            if seconds > min(RUN_SECONDS, deadline.left() / 20) / 2:
                break
        tokens, hidden = self._x.shape
        self._flops = 3 * 2 * tokens * hidden * 4 * hidden
        size = f"{tokens:,} x {hidden:,} by {4 * hidden:,}"
        self.how = f"the {_DTYPES[dtype]} products of a linear layer of {size}, both ways"

    def compute(self) -> None:
        """Compute all three."""
        torch.mm(self._x, self._weight.t())
        torch.mm(self._grad, self._weight)
        torch.mm(self._grad.t(), self._x)

    def rate(self) -> float:
        """Compute all three, and return FLOP/s."""
        return self._flops / seconds_of(self.compute, self._device)


def _tiny_cases(device: torch.device, long: Callable[[], object]) -> dict[str, Case]:
    """Make the cases of operations that have next to nothing to compute.

    Arguments:
        device: where they run.
        long: an operation during which a host enqueues many of them.
    """
    tiny, factor = (torch.full((16,), value, dtype=torch.float32, device=device) for value in (0.0, 1.0))

    def many() -> None:
        for _ in range(TINY_OPS):
            tiny.add_(1.0)

    def behind() -> None:
        long()
        many()

    def chain() -> None:
        with torch.enable_grad():
            value = tiny.detach().requires_grad_()
            for _ in range(TINY_OPS):
                value = value * factor
            value.sum().backward()  # type: ignore[no-untyped-call]

    def on_device() -> float:
        if device.type == "cpu":
            return seconds_of(many) / TINY_OPS
        # Behind a long operation, so that the host is ahead of the device and its own time does not count. A difference
        # below 0 stays as it is: the check of figures against machines of its kind finds it.
        return (seconds_of(behind, device) - seconds_of(long, device)) / TINY_OPS

    def on_host() -> float:
        synchronize(device)
        return seconds_of(chain) / (2 * TINY_OPS)

    where = "" if device.type == "cpu" else ", behind a long operation that the device is busy with"
    tiny_products = f"{TINY_OPS} tiny products forward and backward, recorded by autograd, by operation"
    return {
        "op_seconds": (on_device, f"{TINY_OPS} sums of 16 numbers in a row{where}"),
        "op_host_seconds": (on_host, tiny_products),
    }


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Make normal values, with a generator of our own: the user's random numbers stay as they are.

    Zeros would not do: a device draws less power for them, and runs faster than it would in training. A few values
    repeat: to draw all of them would take longer than what is measured with them.
    """
    numel, generator = prod(shape), torch.Generator("cpu").manual_seed(0)
    few = torch.randn(min(numel, 1 << 16), generator=generator, dtype=torch.float32, device="cpu").mul_(scale).to(dtype)
    return few.repeat(-(-numel // few.numel()))[:numel].view(shape).to(device)
