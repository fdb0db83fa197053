"""Engines on the strict device."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from penstock.runtime.accelerator import streams_for
from penstock.runtime.streams import Streams
from tests.device.building import build
from tests.device.loading import load
from tests.lib.ranks import run_ranks


def strict(index: int = 0) -> Streams:
    """New streams of a device."""
    return streams_for(torch.device("strict", index))


def late_ranks(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(rank, *args)` on two ranks that have strict devices; `prepare` finds out which is whose."""
    return run_ranks(work, 2, *args, backend="late", start=with_devices)


def with_devices() -> None:
    """Makes this process one with strict devices, and with collectives between them."""
    load(build())
    from tests.device import collectives  # noqa: F401 - registers the backend


def on_threads(*work: Callable[[], Any]) -> list[Any]:
    """Run functions at once, each on a thread; their results, or the first error."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
