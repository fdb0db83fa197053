"""The share of a rank in the cores near it, on machines made of folders."""

from pathlib import Path

import pytest

from penstock.machine.threads import update_threads


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
        (["0-7"], ranks(1, 2), range(8), 4),
        (["0-7"], ranks(0, 3), range(8), 2),
        (["0-1"], ranks(3, 8), range(2), 1),
        (["0-7", "8-15"], {}, range(16), 16),  # one rank has both nodes
        (["0-7", "8-15"], ranks(0, 2), range(16), 8),
        (["0-7", "8-15"], ranks(1, 8), range(16), 2),
        (["0-7", "8-9"], ranks(1, 2), range(10), 2),  # nodes of unequal size
        (["0-7", "8-15"], ranks(0, 3), range(16), 4),  # two of three ranks on the first node
        (["0-7", "8-15"], ranks(2, 3), range(16), 8),
        (["0-3", "4-7", "8-11", "12-15"], ranks(0, 2), range(16), 8),  # two nodes each
        (["0-7", "8-15"], ranks(0, 4), range(8), 4),  # bound to a node, which two ranks share
        (["0-7", "8-15"], ranks(0, 4), range(4), 4),  # bound to cores of its own
        (["0-7", "8-15"], {}, [3], 1),
        (["0-7"], {}, [90, 91], 2),  # a container that sees another machine's nodes
        (["0-7"], {"LOCAL_WORLD_SIZE": "many"}, range(8), 8),
    ],
)
def test_share(
    tmp_path: Path, cpulists: list[str], environment: dict[str, str], allowed: list[int], threads: int
) -> None:
    assert update_threads(environment, allowed, machine(tmp_path, *cpulists)) == threads


def test_without_a_word_of_nodes_the_cores_are_shared(tmp_path: Path) -> None:
    assert update_threads(ranks(0, 4), range(8), tmp_path / "nowhere") == 2


def test_the_machine_it_runs_on() -> None:
    assert update_threads({}) >= 1
