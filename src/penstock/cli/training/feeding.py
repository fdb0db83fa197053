"""Batches on the device: read ahead by a thread, copied without waiting."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from penstock.cli.training.batches import Ids


def on_device(batches: Iterator[Ids], device: torch.device) -> Generator[Tensor, None, None]:
    """The batches on a device, each in turn. While one is used a thread reads the next one, unless the device is a cpu.

    Close it when no more are wanted: the thread ends then.
    """
    if device.type == "cpu":
        yield from map(torch.from_numpy, batches)
        return
    with ThreadPoolExecutor(1, "penstock-batches") as thread:
        coming = thread.submit(_read, batches, device)
        while (batch := coming.result()) is not None:
            coming = thread.submit(_read, batches, device)
            yield _copied(batch, device)


def to_device(ids: Ids, device: torch.device) -> Tensor:
    """One batch on a device."""
    return torch.from_numpy(ids) if device.type == "cpu" else _copied(torch.from_numpy(ids).pin_memory(), device)


def _read(batches: Iterator[Ids], device: torch.device) -> Tensor | None:
    """The next batch in pinned memory; `None` at the end."""
    ids = next(batches, None)
    if ids is None:
        return None
    with _current(device):  # a thread begins on the first device, and would make a context there on every rank
        return torch.from_numpy(ids).pin_memory()


def _copied(pinned: Tensor, device: torch.device) -> Tensor:
    """Copied on compute's stream, before what uses it. The host goes on.

    Torch's allocator of pinned memory notes the stream of such a copy, and hands the memory out again only when the
    copy is over: the next batch cannot overwrite this one.
    """
    return pinned.to(device, non_blocking=True)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    module: Any = torch.get_device_module(device)
    current: AbstractContextManager[Any] = module.device(device)
    return current
