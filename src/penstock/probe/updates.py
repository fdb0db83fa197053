"""The optimizers' updates, as the engine runs them: the same rules, threads and bytes."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.optim import Lion
from penstock.probe.arithmetic import Stopwatch
from penstock.probe.block import normal
from penstock.probe.sampling import Deadline, Measurement, Turns
from penstock.rules import Pool, Rule, Segment, rule_for

#: Each rule's optimizer of torch, by the rule's name.
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "lion": partial(Lion, lr=1e-4),
}
#: Bytes of a parameter, a gradient and a master: bf16 with the low half of the fp32 value, and plain fp32.
BF16, FP32 = "bf16 with remainders", "fp32"
_DTYPES: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    BF16: (torch.bfloat16, torch.int16),
    FP32: (torch.float32, None),
}
COMPILING_SECONDS = 40.0


class Update:
    """One update of a rule, over and over, on memory of its own or of others' that take turns.

    Arguments:
        name: the rule's name, a key of `OPTIMIZERS`.
        precision: `BF16` or `FP32`.
        numel: how many elements.
        memory: bytes to cut the tensors from: uint8, large enough for `update_bytes`; it may be shared.
    """

    def __init__(self, name: str, precision: str, numel: int, memory: Tensor) -> None:
        optimizer = OPTIMIZERS[name]([torch.zeros(1, device="cpu")])
        self._rule: Rule = rule_for(optimizer)
        self._hyper = self._rule.hyper(optimizer.param_groups[0], step=2)
        dtype, master = _DTYPES[precision]
        cuts = _Cuts(memory)
        param, grad = cuts.take(numel, dtype), cuts.take(numel, dtype)
        self._segment = Segment(
            param=param,
            grad=grad,
            master=None if master is None else cuts.take(numel, master),
            states=tuple(cuts.take(numel, spec.dtype) for spec in self._rule.states),
        )
        changed = [param, *self._segment.states, *([] if self._segment.master is None else [self._segment.master])]
        #: as the engine counts them: all is read, and all but the gradient is written
        self.nbytes = grad.nbytes + 2 * sum(tensor.nbytes for tensor in changed)

    def run(self, pool: Pool | None) -> None:
        """Apply the rule once."""
        self._rule.update_many([(self._segment, self._hyper)], 1.0, pool)


def update_bytes(numel: int) -> int:
    """Count the bytes of memory that any of the updates here needs for so many elements."""
    return 16 * numel + (1 << 20)


def fill(memory: Tensor) -> None:
    """Fill memory with bytes that are small, normal numbers in every dtype: a rule may be slow with other ones."""
    few = normal((1 << 12,), memory.device, torch.float32, scale=0.02).abs_().view(torch.uint8)
    whole = memory.numel() // few.numel()
    memory[: whole * few.numel()].view(whole, few.numel()).copy_(few)


def measure_device_update(device: torch.device, numel: int, deadline: Deadline) -> Measurement | None:
    """Measure AdamW's update on an accelerator.

    Returns:
        `None` where there is no time: its kernel has to be compiled first.
    """
    from penstock.probe.sampling import take_turns
    from penstock.rules.compiler import has_compiler

    if has_compiler(device) and deadline.left() < COMPILING_SECONDS:
        return None
    memory = torch.zeros(update_bytes(numel), dtype=torch.uint8, device=device)
    fill(memory)
    update, watch = Update("adamw", BF16, numel, memory), Stopwatch(device)
    update.run(None)  # compiles
    turns: Turns = take_turns({"update": lambda: update.nbytes / watch.seconds(lambda: update.run(None))}, deadline)
    return turns.measurement("update", f"AdamW of {numel:,} elements in {BF16} on the device")


class _Cuts:
    """Cuts tensors from memory, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Cut the next tensor, at the start of a page."""
        start = -(-self._used // 4096) * 4096
        self._used = start + numel * dtype.itemsize
        return self._memory[start : self._used].view(dtype)
