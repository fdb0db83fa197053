"""Batches on the device of a run, read ahead and copied without waiting."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.cli.training.data.sequences.batches import Batch

About = TypeVar("About")


def on_device(
    batches: Iterator[tuple[Batch, About]], device: torch.device
) -> Generator[tuple[Batch, About], None, None]:
    """Yield the batches on a device. While one is used a thread reads the next one, unless the device is a cpu.

    Close it when no more are wanted: the thread ends then.
    """
    if device.type == "cpu":
        yield from batches
        return
    with ThreadPoolExecutor(1, "penstock-batches") as thread:
        coming = thread.submit(_read, batches, device)
        while (read := coming.result()) is not None:
            # Before the batch is used, so that the next one is read meanwhile.
            coming = thread.submit(_read, batches, device)
            batch, about = read
            yield batch.each(lambda tensor: _copied(tensor, device)), about


def _read(batches: Iterator[tuple[Batch, About]], device: torch.device) -> tuple[Batch, About] | None:
    """Read the next batch into pinned memory; `None` at the end."""
    read = next(batches, None)
    if read is None:
        return None
    batch, about = read
    with _current(device):  # a thread begins on the first device, and would make a context there on every rank
        return batch.each(Tensor.pin_memory), about


def _copied(pinned: Tensor, device: torch.device) -> Tensor:
    """Copy on compute's stream, before what uses the batch. The host goes on.

    Torch's allocator of pinned memory notes the stream of such a copy, and hands the memory out again only when the
    copy is over: the next batch cannot overwrite this one.
    """
    return pinned.to(device, non_blocking=True)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    module: Any = torch.get_device_module(device)
    current: AbstractContextManager[Any] = module.device(device)
    return current
