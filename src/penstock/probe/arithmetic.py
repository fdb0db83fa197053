"""How fast device and host compute: matrix products, operations, the engine's updates, passes over memory."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.config import Options
from penstock.planner.rates import Rate
from penstock.probe.sampling import Case, Deadline, Figures, seconds_each, seconds_of, synchronize, take_turns
from penstock.rules import Pool, Rule, UpdateSlice
from penstock.rules.device import has_compiler
from penstock.rules.standard import AdamRule, LionUpdateRule, SgdRule
from penstock.runtime.hardware import free_device_memory
from penstock.runtime.host_memory import available_host_memory, page_aligned, touch
from penstock.runtime.system import UpdateCores, core_quota, ranks_of_host, share_of_cores, update_cores

#: Tokens and width of the products, from small to large: a layer of a small model to one of a large one.
SHAPES = (
    *((64, 128), (128, 256), (256, 512), (256, 1024), (512, 1024), (1024, 2048)),
    *((2048, 4096), (4096, 4096), (8192, 4096), (8192, 8192)),
)
RUN_SECONDS = 0.03  # of products, about: the time around them is lost in that
LEAST_RUN_SECONDS = 0.002  # also where the time is up, as libraries take long to load: small products say nothing
TINY_OPS = 200
TOKENS, WIDTH = 4, 16  # of a layer that has next to nothing to compute, nor to share among threads
LAYERS_IN_A_ROW = 4  # few enough for an accelerator's queue
#: The host's seconds for an operation of a model that computes, over those for any operation of torch's own layer, for
#: there are views, masks and Python of the model's own. On a cpu, whose caches the model's values take as well, it was
#: 6.6 for a Llama and 8.8 for a GPT-2 of transformers; for a Qwen3 on an H100 (50 to 70 us a kernel, by its trace) 3.
OF_A_MODEL, ON_A_DEVICE = 7.5, 3.0
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
            if seconds > min(RUN_SECONDS, max(LEAST_RUN_SECONDS, deadline.left() / 20)) / 2:
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

    threads, times = torch.get_num_threads(), OF_A_MODEL if device.type == "cpu" else ON_A_DEVICE
    both()
    with _Count() as counted:  # type: ignore[no-untyped-call]
        both()

    def on_host() -> float:
        torch.set_num_threads(1)  # products this small are shared for nothing
        try:
            both()  # what ran before has taken the caches
            synchronize(device)
            return float(times * seconds_of(both, times=LAYERS_IN_A_ROW) / counted.count)
        finally:
            torch.set_num_threads(threads)

    how = f"{times:g} times an operation of torch's transformer layer on {TOKENS} x {WIDTH}, both ways"
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


#: Rules by name. Not of torch's optimizers, whose first one imports for seconds what is not used here.
RULES: Mapping[str, Callable[[], Rule]] = {
    "adamw": partial(AdamRule, "adamw"),
    "sgd": partial(SgdRule, "sgd", momentum=True),
    "lion": partial(LionUpdateRule, "lion"),
}
#: Options of a parameter group: each rule takes its own.
GROUP: Mapping[str, Any] = {
    **{"lr": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "nesterov": False},
    **{"decoupled_weight_decay": True, "momentum": 0.9, "dampening": 0.0},
}
TILE_NUMEL = Options().tile_bytes // 2
LEAST_BYTES, MOST_BYTES = 64 << 20, 2 << 30  # of host memory
CACHES = Path("/sys/devices/system/cpu")
OF_CACHES = 4  # by how much the host's memory is larger than its caches: what fits there is no figure of memory
LEAST_PASS_BYTES, MOST_PASS_BYTES = 32 << 20, 128 << 20  # of a device's, of each tensor of an elementwise pass
LEAST_UPDATE_BYTES, MOST_UPDATE_BYTES = 4 << 20, 256 << 20


class Update:
    """One rule's updates of bf16 tiles that fill some memory, one after the other, as the engine applies them.

    Arguments:
        name: the rule's name, a key of `RULES`.
        memory: uint8; it has room for a tile or more, and may be shared by updates that take turns.
        tile_numel: how many elements a tile has; `None` for one tile in all of the memory.

    Attributes:
        numel: how many elements all tiles have.
        nbytes: the bytes that all of them read and write, as the engine counts them.
    """

    def __init__(self, name: str, memory: Tensor, tile_numel: int | None = TILE_NUMEL) -> None:
        self._rule = RULES[name]()
        self._step_scalars = self._rule.step_scalars(GROUP, step=2)
        # Parameter, gradient, the low half of the fp32 master, states.
        dtypes = [torch.bfloat16, torch.bfloat16, torch.int16, *(spec.dtype for spec in self._rule.states)]
        each_bytes = sum(each.itemsize for each in dtypes)
        if tile_numel is None:
            tile_numel = memory.numel() // each_bytes // 1024 * 1024
        tiles = memory.numel() // (tile_numel * each_bytes)
        self._update_slices = []
        for tile in memory[: tiles * tile_numel * each_bytes].view(tiles, -1):
            parts = tile.split([tile_numel * each.itemsize for each in dtypes])
            param, grad, master, *states = (part.view(each) for part, each in zip(parts, dtypes, strict=True))
            self._update_slices.append(UpdateSlice(param=param, grad=grad, master=master, states=tuple(states)))
        self.numel = tiles * tile_numel
        # All is read, and all but the gradient is written.
        self.nbytes = self.numel * (2 * each_bytes - 2)

    def run(self, pool: Pool | None) -> None:
        """Apply the rule once to each tile."""
        for update_slice in self._update_slices:
            self._rule.update_many([(update_slice, self._step_scalars)], 1.0, pool)


def fill(memory: Tensor) -> None:
    """Fill memory with bytes that are small, normal numbers in every dtype: a rule may be slower with other ones.

    They are bf16 numbers: two of them, read as one fp32 number, are about the first one.
    """
    few = normal((1 << 13,), memory.device, torch.bfloat16, scale=0.02).abs_().view(torch.uint8)
    whole = memory.numel() // few.numel()
    memory[: whole * few.numel()].view(whole, few.numel()).copy_(few)
    memory[whole * few.numel() :].zero_()


def measure_device(device: torch.device, deadline: Deadline) -> Figures:
    """Measure passes over the device's memory: `device_bandwidth`.

    Arguments:
        device: the one that computes.
        deadline: when to be done.
    """
    free = free_device_memory(device)
    nbytes = deadline.nbytes(LEAST_PASS_BYTES, MOST_PASS_BYTES)
    nbytes = nbytes if free is None else min(nbytes, free // 16)
    moved = [torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for _ in range(3)]
    add = partial(torch.add, moved[0], moved[1], out=moved[2])
    how = f"a sum of two tensors into a third, {nbytes >> 20} MiB each, read and written"
    return take_turns({"device_bandwidth": (lambda: 3 * nbytes / seconds_each(add, device), how)}, deadline)


def measure_device_update(device: torch.device, deadline: Deadline) -> Figures:
    """Measure AdamW on an accelerator: `device_update`.

    Arguments:
        device: an accelerator.
        deadline: when to be done. A kernel that has to be compiled first takes longer, so this comes last.
    """
    memory = torch.empty(deadline.nbytes(LEAST_UPDATE_BYTES, MOST_UPDATE_BYTES), dtype=torch.uint8, device=device)
    fill(memory)
    update = Update("adamw", memory, None)  # a device takes what is in its reach in one call
    run = partial(update.run, None)
    runs = "compiled" if has_compiler(device) else "in torch's operations, since no compiler knows the device"
    how = f"AdamW of {update.numel:,} elements, bf16 with remainders, on the device, {runs}"
    return take_turns({"device_update": (lambda: update.nbytes / seconds_each(run, device), how)}, deadline)


def measure_host(device: torch.device, deadline: Deadline) -> Figures:
    """Measure the bandwidth of the host's memory, and its updates.

    Arguments:
        device: the one that computes; the threads of the updates are near it.
        deadline: when to be done.

    Returns:
        `host_threads`, `host_bandwidth`, `update`, `update_<rule>`, and of a cpu `device_update`.
    """
    cores, load, free = cores_of_updates(device), os.getloadavg()[0], available_host_memory()
    least, most = max(LEAST_BYTES, OF_CACHES * cache_bytes()), MOST_BYTES
    if free is not None:
        least, most = min(least, free.nbytes // 8), min(most, free.nbytes // 8)
    memory = page_aligned(deadline.nbytes(least, most))
    touch(memory, cores.count)
    words = f"{memory.numel() >> 20} MiB in all, on {cores.count} threads"
    with contextlib.closing(Pool(cores.count, sorted(cores.with_threads(cores.count).cores or ()))) as pool:
        cases: dict[str, Case] = {"copy": (partial(_copy, pool, memory), f"a copy, read and written, {words}")}
        for name in RULES:
            run = partial(_update, Update(name, memory), pool, memory)
            cases[f"update_{name}"] = run, f"{name} of bf16 with remainders in tiles, {words}"
        found = take_turns(cases, deadline)
    # What the memory can do is what any pass gets out of it: a copy reads what it is about to overwrite, and moves more
    # than it is counted for, an update in place does not.
    fastest = max(found.values(), key=lambda each: each.value)
    others = ", ".join(f"{name} {each.value / 1e9:.1f}" for name, each in found.items())
    figures = {name: each for name, each in found.items() if name.startswith("update_")}
    figures["update"] = found["update_adamw"]
    if device.type == "cpu":
        figures["device_update"] = figures["update"]
    figures["host_bandwidth"] = replace(fastest, how=f"the fastest pass: {fastest.how}; of {others} (GB/s)")
    # Figures of a machine that others use are those of what they leave: who reads them is to know.
    how = f"the cores that updates on this host get, within the container's quota; the load was {load:.1f} before"
    return figures | {"host_threads": Rate.stated(cores.count, how)}


def cache_bytes() -> int:
    """Return the bytes of the last level of caches of this process's cores; 0 where the kernel does not say."""
    found: dict[int, dict[str, int]] = {}  # by level, and by the cores that share it
    for core in os.sched_getaffinity(0):
        for cache in CACHES.glob(f"cpu{core}/cache/index*"):
            with contextlib.suppress(OSError, ValueError):
                files = (cache / name for name in ("level", "shared_cpu_list", "size"))
                level, shared, size = (file.read_text().strip() for file in files)
                found.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) << 10
    return sum(found[max(found)].values()) if found else 0


def cores_of_updates(device: torch.device) -> UpdateCores:
    """Choose the cores of the updates on this host: of the one rank there is, or of all of them together.

    Figures are the host's: ranks that update at once share them.
    """
    return update_cores(device) if ranks_of_host() == 1 else share_of_cores({}, quota=core_quota())


def _copy(pool: Pool, memory: Tensor) -> float:
    """Copy the first half of memory to the second; bytes/s, read and written."""
    half, address = memory.numel() // 2, memory.data_ptr()
    return 2 * half / seconds_of(lambda: pool.copy(address + half, address, half))


def _update(update: Update, pool: Pool, memory: Tensor) -> float:
    """Update every tile; bytes/s, read and written."""
    fill(memory)  # where another rule has had its masters, this one would find numbers that no training has
    return update.nbytes / seconds_of(lambda: update.run(pool))
