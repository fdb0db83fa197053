"""What the bound is told of a step."""

from typing import Any

from penstock.config import Options, Placement
from penstock.planner.candidates import Choice
from penstock.planner.count_workload import load_of
from penstock.planner.trials import Trials
from penstock.planner.workload import Load
from penstock.tiers.staging import LEAST_FILE_SLOTS, RING_BYTES
from tests.planning import Net, Tellable, asked


def load(choice: Choice = Choice(), model: Any = lambda: Net(), **changes: Any) -> Load:  # noqa: B008 - a value
    request = asked(model, **changes)
    simulation = Trials(request).run(Placement(), choice).simulation
    return load_of(simulation, choice, request.machine, request.setup.grid, micro_batches=request.setup.micro_batches)


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
    found = load()
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


def test_rings_hold_what_their_constants_say() -> None:
    assert load().kept_bytes == 2 * RING_BYTES
    large = load(arguments={"options": Options(tile_bytes=RING_BYTES)})
    assert large.kept_bytes > 2 * LEAST_FILE_SLOTS * RING_BYTES


def test_ranks_of_a_host_are_told() -> None:
    assert load(world_size=4, hosts=2).ranks_of_host == 2
    assert load().ranks_of_host == 1


def test_whole_gradients_that_are_held_back_are_reduced_once() -> None:
    assert load(world_size=2, micro_batches=3, arguments={"stage": 1}).reductions == 1
    assert load(world_size=2, micro_batches=3).reductions == 3


def test_compute_takes_longer_in_backward_and_more_so_where_it_computes_again() -> None:
    found, again = load(), load(Choice(recompute=True), lambda: Tellable())
    assert 0 < found.forward_s < found.backward_s < again.backward_s
    assert again.forward_s == found.forward_s
