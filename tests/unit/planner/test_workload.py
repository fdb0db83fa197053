"""What a step consists of."""

from functools import cache
from typing import Any

import pytest

from penstock.config import Options, Placement
from penstock.planner.trials import Trials
from penstock.planner.workload import Choice, StepWorkload, count_workload
from tests.lib.planning import Net, Tellable, asked, desktop


def load(choice: Choice = Choice(), model: Any = lambda: Net(), **changes: Any) -> StepWorkload:  # noqa: B008 - a value
    request = asked(model, **changes)
    trials, setup = Trials(request), request.setup
    simulation, costs = trials.run(Placement(), choice).simulation, trials.costs(request.machine)
    folders = len(request.folders)
    return count_workload(simulation, costs, setup.grid, micro_batches=setup.micro_batches, folders=folders)


@cache
def plain() -> StepWorkload:
    return load()


# Each parameter begins at a multiple of 256 elements.
BIAS = 256
BLOCK, REST = 64 * 64 + BIAS, 2 * 32 * 64 + BIAS


def test_state_is_counted_to_the_byte() -> None:
    found = load(arguments={"master": "fp32"})
    numel = 4 * BLOCK + REST
    assert (found.params_bytes, found.own_params_bytes, found.frozen_bytes) == (2 * numel, 2 * numel, 0)
    assert found.optimizer_bytes == 3 * 4 * numel
    assert found.forward_gathered_bytes == 2 * numel


def test_what_is_around_all_blocks_is_gathered_once_for_forward_and_backward() -> None:
    found = plain()
    assert found.forward_gathered_bytes - found.backward_gathered_bytes == 2 * REST


def test_of_copies_backward_brings_the_whole_and_forward_what_others_have_not_updated() -> None:
    """In stages 0 to 2 parameters that rest in host memory are there on every rank."""
    found = load(world_size=2, arguments={"stage": 1})
    assert found.forward_gathered_bytes == found.own_params_bytes == found.params_bytes // 2
    assert found.backward_gathered_bytes > found.own_params_bytes
    shards = load(world_size=2)
    assert shards.backward_gathered_bytes < shards.own_params_bytes


def test_a_unit_that_stays_gathered_comes_once_for_several_micro_batches() -> None:
    small = {"arguments": {"options": Options(persistent_bytes=2 * 64)}}
    one, two = load(**small), load(**small, micro_batches=2)
    assert one.forward_gathered_bytes - two.forward_gathered_bytes == 2 * 5 * BIAS


def test_files_are_spread_over_folders_and_the_memory_that_they_pass_is_one() -> None:
    one, two = plain(), load(folders=["/a", "/b"], machine=desktop().replace(folders=2))
    assert two.rates["read"]["read 0"] == pytest.approx(one.rates["read"]["read 0"] / 2)
    assert two.rates["read"]["host memory"] == pytest.approx(one.rates["read"]["host memory"])


def test_compute_takes_longer_in_backward_and_more_so_where_it_computes_again() -> None:
    found, again = plain(), load(Choice(recompute=True), lambda: Tellable())
    seconds = [each.busy[window]["compute"] for each in (found, again) for window in ("forward", "backward")]
    assert 0 < seconds[0] == seconds[2] < seconds[1] < seconds[3]


def test_tiles_end_where_the_engine_cuts() -> None:
    """Embedding and head, and each block, are one tile; several where tiles are small."""
    ends = plain().tile_ends
    assert (ends[0], ends[-1], len(ends)) == (0.0, 1.0, 6)
    assert len(load(arguments={"options": Options(tile_bytes=4096)}).tile_ends) > 6
