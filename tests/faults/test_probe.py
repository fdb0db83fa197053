"""A probe that is ended in the middle of a disk: nothing of it stays."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, torch
from penstock.probe import disks
from penstock.probe.sampling import Deadline

move, moves = disks._Disk.move, []

def and_say(self, order):
    moves.append(order)
    if len(moves) == 6:  # files are there, transfers were made
        print("ready", flush=True)
    move(self, order)

disks._Disk.move = and_say
disks.measure_disks([sys.argv[1]], Deadline(60))
"""


def ended(folder: Path, sent: signal.Signals) -> int:
    process = subprocess.Popen([sys.executable, "-c", CODE, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sent)
        return process.wait(30)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=lambda sent: sent.name)
def test_a_probe_that_is_ended_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    assert ended(tmp_path, sent) == -sent
    assert list(tmp_path.iterdir()) == []
