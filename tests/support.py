"""What tests share: several ranks on one machine, and engines on streams of the test's choice."""

import math
import random
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock.blueprint import PrepareRequest
from penstock.build import build
from penstock.engine.unit.parameter import ReleasedTensor
from penstock.runtime import host_memory
from penstock.runtime.collectives import Collectives
from penstock.runtime.host_memory import Arena
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import Event, InlineStreams, Streams, Work
from penstock.tiers import staging
from tests.lib.ranks import PRELOADED, RANK_TIMEOUT, run_ranks

__all__ = ["PRELOADED", "RANK_TIMEOUT", "run_ranks"]

SOURCE = str(Path(penstock.__file__).parent)


def thorough(*values: Any, id: str | None = None) -> Any:
    """A row of a table that `make test-thorough` runs, and `make test` leaves out: others are much like it."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Every so-many-th row of a long table; `make test-thorough` runs the others."""
    return [value if number % every == 0 else thorough(value) for number, value in enumerate(values)]


def sampled_rows(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The same of rows of several values."""
    return [row if number % every == 0 else thorough(*row) for number, row in enumerate(rows)]


def inline() -> Streams:
    """Nothing asynchronous: what a cpu as the device gets."""
    return InlineStreams(torch.device("cpu"))


class SeparateStreams(InlineStreams):
    """A device whose memory is not the host's, on which nothing is asynchronous: gathers copy, releases free."""

    aliases_host = False


def separate() -> Streams:
    """Nothing asynchronous, everything moved: the arithmetic and the memory of an accelerator."""
    return SeparateStreams(torch.device("cpu"))


def simulated(seed: int = 0, most_seconds: float = 0.002) -> SimulatedStreams:
    """Asynchronous streams with random delays."""
    delays = random.Random(seed)
    return SimulatedStreams(lambda stream, nbytes: delays.uniform(0, most_seconds))


def released(seed: int = 0, most_seconds: float = 0.002) -> SimulatedStreams:
    """The same, where units are released and gathered for each use also if compute could read them in place."""
    streams = simulated(seed, most_seconds)
    streams.reads_in_place = False
    return streams


def is_released(parameter: Tensor) -> bool:
    """Whether a parameter's values are not there."""
    return issubclass(type(parameter), ReleasedTensor)


def disks(count: int = 1) -> list[Path]:
    """Folders for the nvme tier, on the file system of temporary files; each engine makes its own inside."""
    folders = [Path(tempfile.gettempdir(), "disks-of-tests", str(number)) for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def shorten_rings(patch: pytest.MonkeyPatch, slots: int = 2) -> None:
    """A few slots of a tile: next to nothing is still in them when it is wanted again."""
    patch.setattr(staging, "LEAST_FILE_SLOTS", slots)
    patch.setattr(staging, "RING_BYTES", 0)


def memory(nbytes: int, seed: int | None = None) -> Tensor:
    """Page-aligned bytes, random ones where there is a seed."""
    tensor = Arena(nbytes, torch.device("cpu")).allocate(nbytes, torch.uint8)
    if seed is not None:
        tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return tensor


def pinning_on_cpu(patch: pytest.MonkeyPatch, limit: float = math.inf) -> dict[int, int]:
    """The cpu stands for a device that memory is pinned for, and that refuses more than some bytes.

    Returns:
        What is pinned: bytes by address.
    """
    pinned: dict[int, int] = {}

    def register(allocation: Tensor, device: torch.device) -> bool:
        fits = sum(pinned.values()) + allocation.numel() <= limit
        if fits:
            pinned[allocation.data_ptr()] = allocation.numel()
        return fits

    def unregister(address: int, device: torch.device) -> None:
        del pinned[address]

    patch.setattr(host_memory, "needs_pinning", lambda device: True)
    patch.setattr(host_memory, "can_register", lambda device: True)
    patch.setattr(host_memory, "register", register)
    patch.setattr(host_memory, "unregister", unregister)
    patch.setattr(host_memory, "pinned_buffer", lambda nbytes, device, alignment: None)
    return pinned


class BrokenError(Exception):
    pass


class BreakingStreams(SimulatedStreams):
    """All work of one stream fails from the moment that it is named."""

    broken: str | None = None

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        def fail() -> None:
            raise BrokenError(stream)

        return super().submit(stream, fail if stream == self.broken else work, **rest)


def prepare_on(
    streams: Streams,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: Any = None,
    precision: str = "bf16",
    **arguments: Any,
) -> penstock.Optimizer:
    """`penstock.prepare` on the given streams."""
    given = {name: value for name, value in arguments.items() if value is not None}
    request = PrepareRequest(precision=precision, **given)  # type: ignore[arg-type]
    options = request.options
    timeout_s = min(options.timeout_s, _group_timeout_s())
    ranks = Collectives.from_mesh(mesh, sharded=request.stage > 0, timeout_s=timeout_s, nodes=options.nodes)
    return build(model, optimizer, request, ranks, streams)


def _group_timeout_s() -> float:
    """The timeout that `run_ranks` was given: a rank that is wrong must not leave the others waiting for longer."""
    if not dist.is_initialized():
        return math.inf
    group: Any = dist.group.WORLD
    told = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return max((float(each._timeout.total_seconds()) for each in told if each is not None), default=math.inf)


@dataclass
class Interrupted:
    """How many lines have run, which ones, by the numbers of their first runs, and at which one it was raised."""

    lines: int = 0
    places: dict[str, int] = field(default_factory=dict)
    where: str = ""


def _in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether a frame runs for a `__del__`, from which Python lets no error out."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupt(
    lines: int, error: type[BaseException] = KeyboardInterrupt, *, also: Collection[CodeType] = ()
) -> Iterator[Interrupted]:
    """Raise an error when so many lines of Penstock, or of some other code, have run in this thread; 0 for never."""
    happened = Interrupted()
    if not lines:
        yield happened
        return

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        seen: set[int] = set()

        def at_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                happened.lines += 1
                is_new = frame.f_lineno not in seen
                seen.add(frame.f_lineno)
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                happened.places.setdefault(place, happened.lines)
                # A `with` is met again at its end, before its lock is let go of: no signal of the system comes there.
                if happened.lines >= lines and is_new and not happened.where and not _in_a_finalizer(frame):
                    happened.where = place
                    raise error
            return at_line

        return at_line if frame.f_code.co_filename.startswith(SOURCE) or frame.f_code in also else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield happened
    finally:
        sys.settrace(before)
