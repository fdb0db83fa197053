"""Checkpoints that the installed DeepSpeed writes now, made by it in processes of their own."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deepspeed_checks import check

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SCRIPT = Path(__file__).with_name("deepspeed_files.py")


def make(folder: Path, stage: int, precision: str, world_size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    common |= {"LOCAL_SIZE": str(world_size), "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder, str(stage), precision],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    assert [process.wait(240) for process in processes] == [0] * world_size


@pytest.mark.parametrize(
    ("stage", "precision", "world_size"),
    [(1, "fp32", 1), (2, "fp32", 2), (2, "bf16", 2), (3, "fp32", 2), (3, "bf16", 1)],
)
def test_import(stage: int, precision: str, world_size: int, tmp_path: Path) -> None:
    make(tmp_path / "saved", stage, precision, world_size)
    near = 0.15 if precision == "bf16" else 1e-5
    check(tmp_path / "saved", tmp_path / "out", world_size=world_size, near=near)
