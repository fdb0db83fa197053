"""A probe that is ended in the middle of a disk: nothing of it stays."""

import signal
import subprocess
import sys
from pathlib import Path

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


def test_a_probe_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
