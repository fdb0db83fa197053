"""The optimizers' updates, as the engine runs them: the same rules, threads and bytes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.config import Options
from penstock.layout import round_up
from penstock.probe.arithmetic import Stopwatch
from penstock.probe.block import normal
from penstock.probe.sampling import Deadline, Measurement, take_turns
from penstock.rules import Pool, Rule, UpdateSlice
from penstock.rules.device import has_compiler
from penstock.rules.standard import AdamRule, LionUpdateRule, SgdRule
from penstock.runtime.host_memory import PAGE_BYTES

#: Each rule, and a group of its parameters, by the rule's name. Not of torch's optimizers, whose first one imports for
#: seconds what is not used here.
RULES: Mapping[str, tuple[Callable[[], Rule], Mapping[str, Any]]] = {
    "adamw": (
        partial(AdamRule, "adamw"),
        {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True, "weight_decay": 0.01},
    ),
    "sgd": (
        partial(SgdRule, "sgd", momentum=True),
        {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
    ),
    "lion": (partial(LionUpdateRule, "lion"), {"betas": (0.9, 0.99), "weight_decay": 0.0}),
}
#: Bytes of a parameter, a gradient and a master: bf16 with the low half of the fp32 value, and plain fp32.
BF16, FP32 = "bf16 with remainders", "fp32"
_DTYPES: Mapping[str, tuple[torch.dtype, torch.dtype | None]] = {
    BF16: (torch.bfloat16, torch.int16),
    FP32: (torch.float32, None),
}
TILE_NUMEL = Options().tile_bytes // 2
#: An element of any update here takes so many bytes, and the pages of its tensors.
BYTES_AT_MOST = 18
LITTLE_UPDATE_BYTES = 4 << 20
COMPILING_SECONDS = 20.0


class Update:
    """One rule's updates of tiles that fill some memory, one after the other, as the engine applies them.

    Arguments:
        name: the rule's name, a key of `RULES`.
        precision: `BF16` or `FP32`.
        memory: uint8; it has room for a tile or more, and may be shared by updates that take turns.
        tile_numel: how many elements a tile has.

    Attributes:
        tiles: how many tiles there are.
        numel: how many elements all of them have.
        nbytes: the bytes that all of them read and write, as the engine counts them.
    """

    def __init__(self, name: str, precision: str, memory: Tensor, tile_numel: int = TILE_NUMEL) -> None:
        make, group = RULES[name]
        self._rule = make()
        self._hyper = self._rule.step_scalars({"lr": 1e-4, **group}, step=2)
        dtype, master = _DTYPES[precision]
        changed = [dtype, *([] if master is None else [master]), *(spec.dtype for spec in self._rule.states)]
        cuts = _Cuts(memory)
        self._update_slices: list[UpdateSlice] = []
        while cuts.left >= tile_numel * sum(each.itemsize for each in (dtype, *changed)) + PAGE_BYTES * len(changed):
            param, grad = cuts.take(tile_numel, dtype), cuts.take(tile_numel, dtype)
            held = None if master is None else cuts.take(tile_numel, master)
            states = tuple(cuts.take(tile_numel, spec.dtype) for spec in self._rule.states)
            self._update_slices.append(UpdateSlice(param=param, grad=grad, master=held, states=states))
        self.tiles = len(self._update_slices)
        self.numel = self.tiles * tile_numel
        # All is read, and all but the gradient is written.
        self.nbytes = self.numel * (dtype.itemsize + 2 * sum(each.itemsize for each in changed))

    def run(self, pool: Pool | None) -> None:
        """Apply the rule once to each tile."""
        for update_slice in self._update_slices:
            self._rule.update_many([(update_slice, self._hyper)], 1.0, pool)


def fill(memory: Tensor) -> None:
    """Fill memory with bytes that are small, normal numbers in every dtype: a rule may be slower with other ones.

    They are bf16 numbers: two of them, read as one fp32 number, are about the first one.
    """
    few = normal((1 << 13,), memory.device, torch.bfloat16, scale=0.02).abs_().view(torch.uint8)
    whole = memory.numel() // few.numel()
    memory[: whole * few.numel()].view(whole, few.numel()).copy_(few)
    memory[whole * few.numel() :].zero_()


def measure_device_update(device: torch.device, nbytes: int, whole: Deadline, deadline: Deadline) -> Measurement | None:
    """Measure AdamW's update on an accelerator.

    Arguments:
        device: the accelerator.
        nbytes: how much of its memory to update.
        whole: when all is to be over: what compiling may take.
        deadline: when to be done, of what is compiled.

    Returns:
        `None` where there is no time: its kernel has to be compiled first.
    """
    compiles = has_compiler(device)
    if compiles and whole.left() < COMPILING_SECONDS:
        return None
    watch = Stopwatch(device)
    update = _whole(device, nbytes if compiles else min(nbytes, LITTLE_UPDATE_BYTES))
    seconds = watch.seconds(lambda: update.run(None))
    if not compiles:  # many passes over memory: as large as there is time for
        seconds = watch.seconds(lambda: update.run(None))
        if 8 * seconds * nbytes / LITTLE_UPDATE_BYTES < deadline.left():
            update = _whole(device, nbytes)
    turns = take_turns({"update": lambda: update.nbytes / watch.seconds_each(lambda: update.run(None))}, deadline)
    how = "compiled" if compiles else "in torch's operations, since no compiler knows the device"
    return turns.measurement("update", f"AdamW of {update.numel:,} elements, {BF16}, on the device, {how}")


def _whole(device: torch.device, nbytes: int) -> Update:
    """Make an update of all of some new memory at once: a device takes what is in its reach in one call."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    fill(memory)
    return Update("adamw", BF16, memory, nbytes // BYTES_AT_MOST)


class _Cuts:
    """Cuts tensors from memory, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return self._memory.numel() - self._used

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Cut the next tensor, at the start of a page."""
        start = round_up(self._used, PAGE_BYTES)
        self._used = start + numel * dtype.itemsize
        return self._memory[start : self._used].view(dtype)
