"""Ranks on two hosts with a slow link between them: the same results as on one, and no more on the link than stated."""

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import two
from tests.hosts.work import BLOCKS, DISKS, ROWS, STEPS, TINY, UNIT_BYTES, train_all
from tests.lib.ranks import run_ranks

MIB = 1 << 20
MOST_SECONDS = 200
# What frames add: 66 bytes of headers to each 1,448, and 66 for the acknowledgement of each two that come.
OVERHEAD = (1448 + 66 + 33) / 1448
CONTROL_BYTES = 24 << 10  # for each step: norms, what ranks compare, and the barriers of the measurement itself

# What a host sends per step and block, in units of a block's bytes. In a ring of four ranks, two on each host, one rank
# of each sends to the other host: 3/4 in a gather. gloo sums to shards as it sums to all, and sends 3/4 twice. Of two
# copies each rank sends its shard's bytes once; there are two shards on a host.
GATHER, ALL_REDUCE, COPIES = 3 / 4, 3 / 2, 1.0
PER_BLOCK = {
    "hybrid": COPIES,
    "sharded": 2 * GATHER + ALL_REDUCE,
    "copies": ALL_REDUCE,
}
SPEC = {"mbit": 500, "hosts": [{"name": "a", "disk_bytes": 128 * MIB}, {"name": "b", "disk_bytes": 60 * MIB}]}


@contextlib.contextmanager
def hosts(folder: Path, **more: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Two hosts that are there as long as the block, at the most."""
    spec = Path(folder, "spec.json")
    spec.write_text(json.dumps(SPEC | {"folder": str(folder)} | more))
    process = subprocess.Popen(two.command(spec), stderr=subprocess.PIPE, preexec_fn=two.end_with_parent)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@cache
def refused() -> str:
    """Say why there can be no two hosts here; empty where there can."""
    missing = [program for program in ("unshare", "ip", "tc", "mount") if shutil.which(program) is None]
    if sys.platform != "linux" or missing:
        return f"no {', '.join(missing) or 'Linux'}"
    with tempfile.TemporaryDirectory() as folder, hosts(Path(folder)) as process:
        _, said = process.communicate(timeout=60)
    return f"namespaces or interfaces are refused: {said.decode().strip()[:300]}" if process.returncode else ""


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if refused():
        pytest.skip(f"two hosts on one machine: {refused()}")


def on_two_hosts(folder: Path) -> list[dict[str, Any]]:
    """What each rank has found."""
    with hosts(folder, module="tests.hosts.work", arguments=[str(folder)]) as process:
        _, said = process.communicate(timeout=MOST_SECONDS)
    logs = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*/log")))
    assert process.returncode == 0, f"{said.decode()}\n{logs}"
    return [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(4)]


def same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert len(found["states"]) == len(expected["states"]) > 0
    for one, other in zip(found["states"], expected["states"], strict=True):
        assert torch.equal(one, other)


def test_two_hosts_train_as_one_and_send_what_is_stated(tmp_path: Path) -> None:
    on_each = on_two_hosts(tmp_path)
    assert [found["host"] for found in on_each] == ["a", "a", "b", "b"]
    # 1. The same results as on one host, on disks too, whatever the clocks say.
    for found, expected in zip(on_each, run_ranks(train_all, 4), strict=True):
        for row in ROWS:
            same_bits(found["rows"][row.name], expected[row.name])
        same_bits(found["disks"], expected[DISKS.name])
        check_link(found["rows"])
        check_disks(found["disks"])
    # 2. Who refuses is named, with its host.
    *others, own = (found["stranger"] for found in on_each)
    assert own.startswith("ConfigError: ")
    for said in others:
        assert said.startswith("EngineError: Rank 3 of 4 (host b) failed in full_param(), and this one stops with it. ")
        assert own in said


def check_link(rows: dict[str, Any]) -> None:
    """Hold the bytes that a host has sent against what is stated."""
    for name, per_block in PER_BLOCK.items():
        stated = STEPS * BLOCKS * UNIT_BYTES * per_block
        assert stated < rows[name]["sent"] < stated * OVERHEAD + STEPS * CONTROL_BYTES, name
    assert rows[TINY.name]["sent"] < STEPS * CONTROL_BYTES
    # Before the first step ends: the first rank's values in fp32, once over the link where there are copies. gloo sends
    # them twice where the ranks of both hosts share one copy.
    values = BLOCKS * UNIT_BYTES * 2
    for row in ROWS:
        if row.name in PER_BLOCK:
            step = BLOCKS * UNIT_BYTES * PER_BLOCK[row.name]
            most = (values * (1 if row.copies == 2 else 2) + step) * OVERHEAD + 16 * CONTROL_BYTES
            assert rows[row.name]["first_step"] < most, row.name


def check_disks(found: dict[str, Any]) -> None:
    """Host b's disk has room for one rank's files and not for two ranks'; all refuse, and leave nothing."""
    text = found["refused"]
    assert text.startswith(
        "NvmeError: Host b, rank 2: The nvme tier needs 41,943,040 bytes on this rank; the ranks of host b need "
    )
    assert "Host a" not in text
    assert "/b/disk' has " in text
    assert found["left"] == found["left after"] == []
