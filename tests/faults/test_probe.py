"""A probe that is ended in the middle of a disk: nothing of it stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.probe import disks
from penstock.probe.sampling import Deadline
from tests.lib.processes import kill_once_it_says_so


def test_a_probe_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    def probe(say: Callable[[], None]) -> None:
        move, moves = disks._Disk.move, []

        def and_say(disk: Any, order: Any) -> None:
            moves.append(order)
            if len(moves) == 6:  # files are there, transfers were made
                say()
            move(disk, order)

        disks._Disk.move = and_say  # type: ignore[method-assign]
        disks.measure_disks([tmp_path], Deadline(60))

    kill_once_it_says_so(probe)
    assert list(tmp_path.iterdir()) == []
