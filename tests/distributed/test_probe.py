"""The probe of several ranks: one measures the machine, all measure what is between them, and all know the same."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock.planner.rates import Rate
from penstock.probe import links
from penstock.probe import measure as probing
from penstock.probe.links import measure_collectives
from penstock.probe.measure import measure
from penstock.runtime.control_group import ControlGroup
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by

CPU = torch.device("cpu")


def probed(rank: int, folder: str) -> dict[str, Any]:
    alone: list[int] = []

    def measure_alone(*_: Any) -> dict[str, Rate]:
        alone.append(rank)
        return {"update": Rate(1.0 + rank, 1.0, 2.0, f"rank {rank}")}

    patch = pytest.MonkeyPatch()
    patch.setattr(probing, "_measure_alone", measure_alone)
    found, _ = measure(seconds=1, device=CPU)
    by_itself, _ = measure(seconds=1, device=CPU, control_group=ControlGroup())
    refused = said_by(lambda: measure(folders=[folder] if rank == 0 else [], seconds=1, device=CPU))
    patch.undo()
    pairs = [dist.new_group([0, 1]), dist.new_group([0]), dist.new_group([1])]
    control_group = ControlGroup((0, 1), rank)
    by_dimension = measure_collectives(CPU, {"shard": pairs[0], "replicate": pairs[1 + rank]}, control_group, 0.2)
    control_group.close()
    return {
        "by dimension": by_dimension,
        "alone": alone,
        "found": found,
        "by itself": by_itself,
        "refused": refused,
    }


def test_one_rank_measures_and_all_get_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(probed, 2, str(tmp_path / "missing"))
    assert (first["alone"], second["alone"]) == ([0, 0], [1])
    assert first["found"] == second["found"]
    assert first["found"]["update"].how == "rank 0"
    assert first["found"].keys() == {"update", "link_bandwidth", "link_seconds"}
    # By itself a rank asks nobody: the other one may be elsewhere.
    assert second["by itself"] == {"update": Rate(2.0, 1.0, 2.0, "rank 1")}
    assert "all-gathers between 2 ranks (1,024 bytes " in first["found"]["link_bandwidth"].how
    # A dimension of one rank has no links.
    assert first["by dimension"] == second["by dimension"]
    assert "slowest" not in first["by dimension"]["link_bandwidth"].how
    assert first["refused"].startswith("ConfigError: The folder ")
    assert "missing' cannot be probed" in second["refused"]


def on_two_hosts(rank: int) -> dict[str, Any]:
    """Four ranks, of which the launcher says that two are on each host."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    every, rows = dist.new_group(range(4)), init_device_mesh("cpu", (2, 2))
    columns = {"shards": rows.get_group(1), "copies": rows.get_group(0)}
    control_group, found = ControlGroup(range(4), rank), {}
    for name, groups in (("flat", {"shards": every}), ("hybrid", columns), ("apart", {"copies": columns["copies"]})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "_measure_group", lambda device, group, *_: measured(group))
            found[name] = measure_collectives(CPU, groups, control_group, 1.0)
    control_group.close()
    return {name: {key: figure.value for key, figure in figures.items()} for name, figures in found.items()}


def measured(group: dist.ProcessGroup) -> tuple[Rate, Rate]:
    """Ranks that are further apart are slower."""
    ranks = dist.get_process_group_ranks(group)
    rate, seconds = 100.0 / (ranks[-1] - ranks[0]), float(len(ranks))
    return Rate(rate, rate, rate, "made up"), Rate(seconds, seconds, seconds, "made up")


def test_each_dimension_is_measured_by_where_its_ranks_lie() -> None:
    """Of copies each host has two rings at once, and a network is said for the host."""
    links = {"link_bandwidth": 100.0, "link_seconds": 2.0}
    for found in run_ranks(on_two_hosts, 4):
        assert found["flat"] == {"net_bandwidth": 100 / 3, "net_seconds": 4.0} | links
        assert found["hybrid"] == {"net_bandwidth": 2 * 50.0, "net_seconds": 2.0} | links
        assert found["apart"] == found["hybrid"]
