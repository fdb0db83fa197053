"""How fast the device computes: matrix products, passes over its memory, and what one operation costs at least."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.probe.block import Block, normal
from penstock.probe.sampling import Deadline, Measurement, Turns, seconds_of, take_turns
from penstock.runtime.hardware import Hardware, free_device_memory

#: Tokens and width of the products, from small to large: a layer of a small model to one of a large one.
SHAPES = (
    *((64, 128), (128, 256), (256, 512), (256, 1024), (512, 1024), (1024, 2048)),
    *((2048, 4096), (4096, 4096), (8192, 4096), (8192, 8192)),
)
#: A run is to last so long: what surrounds it is lost in that.
CPU_RUN_SECONDS, DEVICE_RUN_SECONDS = 0.03, 0.01
PASS_BYTES, LITTLE_PASS_BYTES = 128 << 20, 32 << 20  # of each tensor of an elementwise pass
LITTLE_SECONDS = 4.0  # in less, smaller things are measured
TINY_OPS = 200
MOST_TIMES = 200
_WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Stopwatch:
    """Times work of a device, from when it is idle to when it is idle again.

    Arguments:
        device: any device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hardware = None if device.type == "cpu" else Hardware(device)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._hardware is not None:
            self._hardware.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Run work and return its seconds."""
        self.synchronize()

        def whole() -> None:
            work()
            self.synchronize()

        return seconds_of(whole)

    def seconds_each(self, work: Callable[[], object]) -> float:
        """Run work of an accelerator so often that its start and its end do not count; the seconds of one run."""
        once = self.seconds(work)
        if self.device.type == "cpu" or once > DEVICE_RUN_SECONDS:
            return once
        times = min(MOST_TIMES, int(DEVICE_RUN_SECONDS / once) + 1)

        def often() -> None:
            for _ in range(times):
                work()

        return self.seconds(often) / times

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Run work and return the seconds that the host needed to give it to the device."""
        self.synchronize()
        seconds = seconds_of(work)
        self.synchronize()
        return seconds


def measure_passes(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Measure passes over the device's memory: `device_bandwidth`.

    Arguments:
        device: the one that computes.
        deadline: when to be done.
    """
    watch = Stopwatch(device)
    moved = _pass_tensors(device, deadline)
    nbytes = sum(tensor.nbytes for tensor in moved)
    add = partial(torch.add, moved[0], moved[1], out=moved[2])
    turns = take_turns({"pass": lambda: nbytes / watch.seconds_each(add)}, deadline)
    how = f"a sum of two tensors into a third, {moved[0].nbytes >> 20} MiB each, read and written"
    return {"device_bandwidth": turns.measurement("pass", how)}


def measure_arithmetic(device: torch.device, deadline: Deadline) -> dict[str, Measurement]:
    """Measure what the device computes in a second.

    Arguments:
        device: the one that computes.
        deadline: when to be done.

    Returns:
        `flops_*`, `op_seconds` and `op_host_seconds`.
    """
    watch = Stopwatch(device)
    dtypes = [torch.float32, torch.bfloat16] + ([] if device.type == "cpu" else [torch.float16])
    cold = [Products(watch, dtype, *SHAPES[0]) for dtype in dtypes]
    for each in cold:
        each.compute()  # the first product of a dtype may load a library
    sizing = deadline.share(0.35)
    products = {each.dtype: each.fitted(sizing.share(1 / (len(cold) - number))) for number, each in enumerate(cold)}
    cases: dict[str, Callable[[], float]] = {f"flops_{_WORDS[dtype]}": each.run for dtype, each in products.items()}
    cases |= _tiny_cases(watch, products[torch.float32])
    # In the dtype that one would train in: some processors have no arithmetic for the other one.
    like = max(products.values(), key=Products.run)
    block, words = _block_case(watch, like)
    turns = take_turns(cases | {"block": block}, deadline)
    figures = {
        f"flops_{_WORDS[dtype]}": turns.measurement(f"flops_{_WORDS[dtype]}", products[dtype].words) for dtype in dtypes
    }
    checked = f"flops_{_WORDS[like.dtype]}"
    share = turns.median("block") / turns.median(checked)
    figures[checked] = figures[checked]._replace(how=f"{figures[checked].how}; {words} ran at {share:.2f} of it")
    return figures | _op_figures(turns, device)


class Products:
    """The three matrix products of a linear layer in training: its output, and both gradients.

    Arguments:
        watch: times them.
        dtype: what they are of.
        tokens: rows of the input.
        hidden: its width; the output is four times as wide.
    """

    def __init__(self, watch: Stopwatch, dtype: torch.dtype, tokens: int, hidden: int) -> None:
        self._watch = watch
        self.dtype, self.tokens, self.hidden = dtype, tokens, hidden
        self._x = normal((tokens, hidden), watch.device, dtype)
        self._weight = normal((4 * hidden, hidden), watch.device, dtype, scale=hidden**-0.5)
        self._grad = normal((tokens, 4 * hidden), watch.device, dtype)
        self._flops = 3 * 2 * tokens * hidden * 4 * hidden
        name = _WORDS[dtype]
        self.words = f"the {name} products of a linear layer of {tokens:,} x {hidden:,} by {4 * hidden:,}, both ways"

    def fitted(self, deadline: Deadline) -> "Products":
        """Make products that are large enough to be measured, of those that fit in the time and the memory.

        What a larger one takes is expected from the one before it; none is tried that would take too long.
        """
        device = self._watch.device
        wanted = min(CPU_RUN_SECONDS if device.type == "cpu" else DEVICE_RUN_SECONDS, deadline.left() / 8)
        free, chosen = free_device_memory(device), self
        for shape in SHAPES[1:]:
            seconds = min(chosen.seconds() for _ in range(3))  # the first one brings its memory
            more = shape[0] * shape[1] ** 2 / (chosen.tokens * chosen.hidden**2)
            nbytes = 4 * self.dtype.itemsize * (shape[0] * shape[1] * 3 + 4 * shape[1] ** 2)
            if (
                2 * seconds > wanted
                or seconds * more > 4 * wanted
                or seconds * more * 5 > deadline.left()
                or (free is not None and nbytes > free)
            ):
                break
            chosen = Products(self._watch, self.dtype, *shape)
        return chosen

    def compute(self) -> None:
        """Compute all three."""
        torch.mm(self._x, self._weight.t())
        torch.mm(self._grad, self._weight)
        torch.mm(self._grad.t(), self._x)

    def seconds(self) -> float:
        """Compute all three, and return the seconds."""
        return self._watch.seconds(self.compute)

    def run(self) -> float:
        """Compute all three, and return FLOP/s."""
        return self._flops / self.seconds()


def _pass_tensors(device: torch.device, deadline: Deadline) -> list[Tensor]:
    """Make the tensors of an elementwise pass: larger than caches, and no burden to a small device."""
    free = free_device_memory(device)
    nbytes = LITTLE_PASS_BYTES if deadline.left() < LITTLE_SECONDS else PASS_BYTES
    nbytes = nbytes if free is None else min(nbytes, free // 16)
    return [torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=device) for _ in range(3)]


def _tiny_cases(watch: Stopwatch, long: Products) -> Mapping[str, Callable[[], float]]:
    """Make the cases of operations that have next to nothing to compute."""
    tiny = torch.zeros(16, dtype=torch.float32, device=watch.device)
    factor = torch.ones(16, dtype=torch.float32, device=watch.device)

    def many() -> None:
        for _ in range(TINY_OPS):
            tiny.add_(1.0)

    def behind() -> None:
        long.compute()
        many()

    def chain() -> None:
        with torch.enable_grad():
            value = tiny.detach().requires_grad_()
            for _ in range(TINY_OPS):
                value = value * factor
            value.sum().backward()  # type: ignore[no-untyped-call]

    def on_device() -> float:
        if watch.device.type == "cpu":
            return watch.seconds(many) / TINY_OPS
        # Behind something long, so that the host is ahead of the device, and its own time does not count. A difference
        # below 0 stays as it is: the check of figures against machines of its kind finds it.
        return (watch.seconds(behind) - watch.seconds(long.compute)) / TINY_OPS

    return {"op_seconds": on_device, "op_host_seconds": lambda: watch.host_seconds(chain) / (2 * TINY_OPS)}


def _op_figures(turns: Turns, device: torch.device) -> dict[str, Measurement]:
    """Make the figures of tiny operations."""
    least = f"{TINY_OPS} sums of 16 numbers in a row" + (
        "" if device.type == "cpu" else ", behind a long operation that the device is busy with"
    )
    host = f"{TINY_OPS} tiny products forward and backward, recorded by autograd, by operation"
    return {
        "op_seconds": turns.measurement("op_seconds", least),
        "op_host_seconds": turns.measurement("op_host_seconds", host),
    }


def _block_case(watch: Stopwatch, like: Products) -> tuple[Callable[[], float], str]:
    """Make the case of a transformer's block, which returns FLOP/s, and say what it is."""
    hidden, tokens = like.hidden, max(64, like.tokens // 2)
    block = Block(hidden, watch.device, like.dtype)
    x = normal((1, tokens, hidden), watch.device, like.dtype).requires_grad_()
    flops = block.flops(1, tokens)

    def both() -> None:
        with torch.enable_grad():
            block(x).sum().backward()
        block.zero_grad()
        x.grad = None

    words = f"a transformer's block of {tokens:,} x {hidden:,} forward and backward"
    return lambda: flops / watch.seconds(both), words
