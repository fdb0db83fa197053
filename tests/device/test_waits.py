"""Every wait of the engine that a row reaches on the strict device is needed there: a report, or another result."""

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from penstock.runtime.accelerator import AcceleratorStreams
from tests.lib.memory import shorten_rings
from tests.lib.streams import inline
from tests.parity.test_waits import (
    EVERYTHING_ON_CPU,
    IN_FILES,
    OPTIMIZER_ON_CPU,
    OPTIMIZER_ON_DEVICE,
    REDUNDANT,
    SPLIT,
    Values,
    same,
    training,
)
from tests.parity.waits import NotedWaits, Wait, listen, waits

# Needed by rows that look, clear, save or move, which are not here but in the table of simulated streams.
ELSEWHERE = {
    "access.written",
    "reduce.buffer_free",
    "staged_copy.over",
    "staged_copy.source_ready",
    "storage.new_read",
    "storage.free_of_reads",
    "storage.free_of_write",
    "storage.reads",
    "storage.memory_written",
    "tile.load_slot_free",
    "tile.slot_stored_from",
    "update.storage_free",
    "update.gradient_written",
    "release.gather_over",
    "host_sum.received",
    "device_sum.received",
    "device_sum.loaded",
    "reduce.over_before_zero",
    "update.earlier_tiles_written",
    "update.in_place_free",
    "load.stored",
    "storage.files_written",
}
#: The device runs beside the host: on a busy machine its work may be over before anything meets it.
TRIES = 8
WAITS = [wait for wait in waits() if wait.site not in REDUNDANT and wait.site not in ELSEWHERE]

ROWS: dict[str, Callable[[Any], Values]] = {
    "everything on cpu": training(EVERYTHING_ON_CPU),
    "optimizer on cpu": training(OPTIMIZER_ON_CPU),
    "optimizer on device": training(OPTIMIZER_ON_DEVICE),
    "in files": training(IN_FILES),
    "streamed": training(EVERYTHING_ON_CPU.but(streamed_updates=0.5)),
    "in parts": training(SPLIT),
}


class DroppingStreams(NotedWaits, AcceleratorStreams):
    """Streams whose waits are known by their place.

    Arguments:
        dropped: `file:line` of the wait that is left out, with `#index` for an entry of `after`.
    """

    def __init__(self, device: torch.device, dropped: str | None = None) -> None:
        super().__init__(device)
        self.dropped, self.seen = dropped, set()


@pytest.fixture(autouse=True)
def _short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots: what reuses one too early meets what is still in it."""
    shorten_rings(monkeypatch)


def attempt(row: str, dropped: str | None) -> tuple[bool, frozenset[str]]:
    """Whether a row goes right, and where it waits."""
    from tests.device.backend import native

    streams = DroppingStreams(torch.device("strict", 0), dropped)
    with pytest.MonkeyPatch.context() as patch:
        heard = listen(patch, dropped)
        try:
            right = same(ROWS[row](streams), expected_of(row))
            torch.accelerator.synchronize()
        except Exception:
            if dropped is None:
                raise
            right = False
        finally:
            with contextlib.suppress(Exception):
                streams.close()
    with contextlib.suppress(Exception):
        torch.accelerator.synchronize()
    races = native.take_races()
    return right and races == [], frozenset(streams.seen.union(*(ear.seen for ear in heard)))


@cache
def expected_of(row: str) -> Values:
    return ROWS[row](inline())


@cache
def reached_by(row: str) -> frozenset[str]:
    """Sites that the row waits at."""
    right, seen = attempt(row, None)
    assert right, row
    return seen


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.site)
def test_without_the_wait_a_row_goes_wrong(wait: Wait) -> None:
    rows = [row for row in ROWS if wait.place in reached_by(row)]
    if not rows:
        pytest.skip("no row waits there")
    if all(attempt(row, wait.place)[0] for row in rows * TRIES):
        pytest.fail(f"{wait.site} ({wait.place}) can be dropped: {', '.join(rows)} stay right")


def test_the_list_of_waits_is_up_to_date() -> None:
    assert {wait.site for wait in waits()} >= ELSEWHERE
