"""The share of a rank in the cores near it, on machines made of folders."""

from pathlib import Path

import pytest
import torch

import penstock
from penstock import construct
from penstock.rules import Pool
from penstock.runtime.system import UpdateCores, hosts_of, share_of_cores


def machine(folder: Path, *cpulists: str) -> Path:
    for number, cpulist in enumerate(cpulists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpulist + "\n")
    (folder / "possible").write_text("0\n")
    return folder


def ranks(rank: int, count: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}


@pytest.mark.parametrize(
    ("cpulists", "environment", "allowed", "threads"),
    [
        (["0-7"], {}, range(8), 8),
        (["0-1"], ranks(3, 8), range(2), 1),
        (["0-7", "8-15"], ranks(0, 2), range(16), 8),
        (["0-7", "8-9"], ranks(1, 2), range(10), 5),  # nodes of unequal size
        (["0-3", "4-7", "8-11", "12-15"], ranks(0, 2), range(16), 8),  # two nodes each
        (["0-7", "8-15"], ranks(0, 4), range(8), 4),  # bound to a node, which two ranks share
        (["0-7", "8-15"], {}, [3], 1),
        (["0-7"], {}, [90, 91], 2),  # a container that sees another machine's nodes
    ],
)
def test_share(tmp_path, cpulists, environment, allowed, threads):
    assert share_of_cores(environment, allowed, machine(tmp_path, *cpulists)) == UpdateCores(threads, None)


@pytest.mark.parametrize(
    ("quota", "environment", "threads"),
    [
        (None, {}, 8),
        (3.9, {}, 3),
        (0.5, {}, 1),
        (4.0, ranks(0, 2), 2),  # ranks of one container share it
        (4.0, ranks(0, 8), 1),
    ],
)
def test_a_container_s_quota_of_time(tmp_path, quota, environment, threads):
    assert share_of_cores(environment, range(8), machine(tmp_path, "0-7"), quota=quota) == UpdateCores(threads, None)


TWO = ["0-7", "8-15"]


@pytest.mark.parametrize(
    ("cpulists", "environment", "allowed", "near", "devices", "expected"),
    [
        (TWO, {}, range(16), 1, [1], UpdateCores(8, frozenset(range(8, 16)))),
        (TWO, ranks(0, 2), range(16), 1, [1, 0], UpdateCores(8, frozenset(range(8, 16)))),  # not as they are numbered
        (TWO, ranks(0, 2), range(16), 0, [0, 0], UpdateCores(4, frozenset(range(8)))),
        (TWO, ranks(3, 4), range(16), 1, [1], UpdateCores(4, frozenset(range(8, 16)))),  # it sees its own device alone
        (TWO, ranks(0, 2), range(16), 0, [0, 0, 1, 1], UpdateCores(4, frozenset(range(8)))),
        (TWO, ranks(0, 2), range(4, 12), 1, [0, 1], UpdateCores(4, frozenset(range(8, 12)))),  # a container's cores
        (TWO, {}, range(8), 1, [1], UpdateCores(8, None)),  # to the other node: it has said so
        (TWO, {}, range(16), None, [None], UpdateCores(16, None)),
        (TWO, {}, range(16), 7, [7], UpdateCores(16, None)),  # a node without cores
    ],
)
def test_updates_run_on_the_cores_of_the_device_s_node(
    tmp_path, cpulists, environment, allowed, near, devices, expected
):
    folder = machine(tmp_path, *cpulists)
    assert share_of_cores(environment, allowed, folder, near=near, devices=devices) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, (2, [4, 5])), (1, (1, [4, 5])), (3, (3, []))])
def test_prepare_starts_as_many_there(monkeypatch, asked, expected):
    started: list[tuple[int, list[int]]] = []

    def pool(threads: int, cores: list[int]) -> Pool:
        started.append((threads, cores))
        return Pool(threads)

    monkeypatch.setattr(construct, "Pool", pool)
    monkeypatch.setattr(construct, "update_cores", lambda device: UpdateCores(2, frozenset({5, 4})))
    model = torch.nn.Linear(4, 4)
    options = penstock.Options(update_threads=asked)
    penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", options=options).close()
    assert started == [expected]


def test_hosts_are_those_that_the_launcher_says():
    """One rank on each of several hosts is said by LOCAL_WORLD_SIZE=1, and nothing is said without it."""
    assert hosts_of(4, {}) == 1
    for said, hosts in {"1": 4, "2": 2, "4": 1, "8": 1, "3": 1, "0": 1, "": 1}.items():
        assert hosts_of(4, {"LOCAL_WORLD_SIZE": said}) == hosts
