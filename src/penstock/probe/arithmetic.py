"""How fast the device computes: matrix products, what one operation costs at least, and what it costs the host."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.probe.sampling import Case, Deadline, Figures, seconds_of, synchronize, take_turns
from penstock.runtime.hardware import free_device_memory

#: Tokens and width of the products, from small to large: a layer of a small model to one of a large one.
SHAPES = (
    *((64, 128), (128, 256), (256, 512), (256, 1024), (512, 1024), (1024, 2048)),
    *((2048, 4096), (4096, 4096), (8192, 4096), (8192, 8192)),
)
RUN_SECONDS = 0.03  # of products, about: the time around them is lost in that
TINY_OPS = 200
TOKENS, WIDTH = 4, 16  # of a layer that has next to nothing to compute, nor to share among threads
LAYERS_IN_A_ROW = 4  # few enough for an accelerator's queue
#: The host's seconds for an operation of a model that computes, over those for any operation of torch's own layer, for
#: there are views, masks and Python of the model's own. It was 6.6 for a Llama and 8.8 for a GPT-2 of transformers.
OF_A_MODEL = 7.5
#: Elements of an operation that one thread does, and of one that two threads or more share: torch's grain is 32,768.
GRAIN = 1 << 15
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def measure_arithmetic(device: torch.device, deadline: Deadline) -> Figures:
    """Measure what the device computes in a second.

    Arguments:
        device: the one that computes.
        deadline: when to be done.

    Returns:
        `flops_*`, `op_seconds` and `op_host_seconds`; of a cpu with several threads `op_threads_seconds` too.
    """
    dtypes = [dtype for dtype in _DTYPES if device.type != "cpu" or dtype is not torch.float16]
    sizing = deadline.share(0.35)
    products = [Products(device, each, sizing.share(1 / (len(dtypes) - n))) for n, each in enumerate(dtypes)]
    cases: dict[str, Case] = {f"flops_{_DTYPES[each.dtype]}": (each.rate, each.how) for each in products}
    return take_turns(cases | _tiny_cases(device, products[0].compute) | _host_cases(device), deadline)


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
    tiny = torch.zeros(16, dtype=torch.float32, device=device)

    def many() -> None:
        for _ in range(TINY_OPS):
            tiny.add_(1.0)

    def behind() -> None:
        long()
        many()

    def on_device() -> float:
        if device.type == "cpu":
            return seconds_of(many) / TINY_OPS
        # Behind a long operation, so that the host is ahead of the device and its own time does not count. Where the
        # difference is below 0, the check of figures against machines of its kind finds what stands in its place.
        return max(seconds_of(behind, device) - seconds_of(long, device), 1e-9) / TINY_OPS

    where = "" if device.type == "cpu" else ", behind a long operation that the device is busy with"
    return {"op_seconds": (on_device, f"{TINY_OPS} sums of 16 numbers in a row{where}")}


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _host_cases(device: torch.device) -> dict[str, Case]:
    """Make the cases of what operations cost a host beside their work: Python, autograd, threads that share them."""
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, device="cpu").to(device)
    x = normal((1, TOKENS, WIDTH), device, torch.float32)

    def both() -> None:
        with torch.enable_grad():
            layer(x).sum().backward()

    threads = torch.get_num_threads()
    both()
    with _Count() as counted:  # type: ignore[no-untyped-call]
        both()

    def on_host() -> float:
        torch.set_num_threads(1)  # products this small are shared for nothing
        try:
            both()  # what ran before has taken the caches
            synchronize(device)
            return float(OF_A_MODEL * seconds_of(both, times=LAYERS_IN_A_ROW) / counted.count)
        finally:
            torch.set_num_threads(threads)

    how = f"{OF_A_MODEL:g} times an operation of torch's transformer layer on {TOKENS} x {WIDTH}, both ways"
    cases: dict[str, Case] = {"op_host_seconds": (on_host, how)}
    if device.type == "cpu" and threads > 1:
        one, shared = (torch.zeros(numel, dtype=torch.float32, device="cpu") for numel in (GRAIN, threads * GRAIN))

        def after_one(last: Tensor) -> None:
            one.add_(1.0)  # meanwhile the other threads fall asleep
            last.add_(1.0)

        def together() -> float:
            alone, beside = (seconds_of(partial(after_one, each), times=TINY_OPS) for each in (one, shared))
            return max(beside - alone, 1e-9)

        words = f"a sum of {threads * GRAIN:,} numbers on {threads} threads, less one of {GRAIN:,} on one"
        cases["op_threads_seconds"] = (together, words)
    return cases


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Make normal values, with a generator of our own: the user's random numbers stay as they are.

    Zeros would not do: a device draws less power for them, and runs faster than it would in training. A few values
    repeat: to draw all of them would take longer than what is measured with them.
    """
    numel, generator = prod(shape), torch.Generator("cpu").manual_seed(0)
    few = torch.randn(min(numel, 1 << 16), generator=generator, dtype=torch.float32, device="cpu").mul_(scale).to(dtype)
    return few.repeat(-(-numel // few.numel()))[:numel].view(shape).to(device)
