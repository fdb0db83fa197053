"""The numbers of a run that follow from what was asked for."""

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import Recipe, recipe_for
from penstock.errors import ConfigError


def recipe(config: TrainConfig, *, positions: int | None = None, world_size: int = 1) -> Recipe:
    return recipe_for(config, positions=positions, world_size=world_size)


@pytest.mark.parametrize(
    ("asked", "positions", "seq_length", "lr", "batch_size"),
    [
        ({}, 4096, 128, 2e-3, 16),
        ({"model": "medium"}, 4096, 128, 2e-3, 16),
        ({"model": "folder"}, 4096, 1024, 2e-5, 4),
        ({"model": "folder"}, 512, 512, 2e-5, 4),
        ({"model": "folder"}, None, 1024, 2e-5, 4),
        ({"model": "folder", "lora": "r=8"}, None, 1024, 2e-4, 4),
        ({"lora": "r=8"}, None, 128, 2e-4, 16),
        ({"model": "folder", "lora": "r=8", "lr": 0.5, "seq_length": 9, "batch_size": 2}, 512, 9, 0.5, 2),
    ],
)
def test_defaults_by_kind_of_model(
    asked: dict[str, Any], positions: int | None, seq_length: int, lr: float, batch_size: int
) -> None:
    assert vars(recipe(TrainConfig(**asked), positions=positions, world_size=2)) == {
        "seq_length": seq_length,
        "lr": lr,
        "batch_size": batch_size,
        "accumulation": 1,
        "world_size": 2,
    }


@pytest.mark.parametrize(
    ("asked", "world_size", "batch_size", "accumulation"),
    [
        # of a folder, whose default is 4 sequences
        ({"global_batch": 64}, 1, 4, 16),
        ({"global_batch": 64}, 8, 4, 2),
        ({"global_batch": 64}, 32, 2, 1),
        ({"global_batch": 6}, 1, 3, 2),
        ({"global_batch": 7}, 1, 1, 7),
        ({"global_batch": 64, "batch_size": 8}, 2, 8, 4),
        ({"global_batch": 64, "accumulation": 8}, 2, 4, 8),
        ({"global_batch": 64, "batch_size": 16, "accumulation": 2}, 2, 16, 2),
        ({"batch_size": 3}, 5, 3, 1),
        ({"accumulation": 3}, 5, 4, 3),
    ],
)
def test_batch_accumulation_and_ranks_make_the_global_batch(
    asked: dict[str, Any], world_size: int, batch_size: int, accumulation: int
) -> None:
    made = recipe(TrainConfig(model="folder", **asked), world_size=world_size)
    assert (made.batch_size, made.accumulation) == (batch_size, accumulation)
    assert made.per_step == asked.get("global_batch", batch_size * accumulation * world_size)


@pytest.mark.parametrize(
    ("asked", "world_size", "message"),
    [
        (
            {"global_batch": 64, "batch_size": 3},
            1,
            "--global-batch 64 is not --batch-size 3 x --accumulation 21 x 1 ranks.",
        ),
        (
            {"global_batch": 64, "accumulation": 5},
            1,
            "--global-batch 64 is not --batch-size 12 x --accumulation 5 x 1 ranks.",
        ),
        ({"global_batch": 64}, 3, "--global-batch 64 is not "),
        ({"global_batch": 2}, 4, "--global-batch 2 is not "),
        (
            {"global_batch": 64, "batch_size": 8, "accumulation": 8},
            2,
            "--global-batch 64 is not --batch-size 8 x --acc",
        ),
    ],
)
def test_a_global_batch_that_nothing_makes(asked: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        recipe(TrainConfig(model="folder", **asked), world_size=world_size)


def test_more_tokens_than_a_tensor_has() -> None:
    with pytest.raises(
        ConfigError, match=r"^--batch-size 65536 of --seq-length 65536 is more than 2147483647 tokens\."
    ):
        recipe(TrainConfig(batch_size=1 << 16, seq_length=1 << 16))


@pytest.mark.parametrize(
    ("asked", "epoch_count", "steps"),
    [
        ({}, 1000, 400),  # a preset
        ({"epochs": 2.0}, 1000, 125),
        ({"steps": 7}, 1000, 7),
        ({"model": "folder", "batch_size": 16}, 1000, 63),  # one epoch, its last step into the next
        ({"model": "folder", "batch_size": 16, "epochs": 0.5}, 1000, 32),
        ({"model": "folder", "batch_size": 16}, 3, 1),
        ({"model": "folder", "batch_size": 16, "epochs": 0.001}, 1000, 1),
    ],
)
def test_how_long_it_is(asked: dict[str, Any], epoch_count: int, steps: int) -> None:
    config = TrainConfig(**asked)
    course = recipe(config).over(config, epoch_count)
    assert (course.steps, course.epoch_count) == (steps, epoch_count)
    assert course.epochs == steps * 16 / epoch_count


@pytest.mark.parametrize(
    ("warmup", "steps", "warmup_steps"),
    [
        (None, 600, 60),
        (None, 5, 1),
        (0.03, 40, 2),
        (7, 600, 7),
        (0.03, 600, 18),
        (0.0, 600, 0),
        (1, 600, 1),
        (600, 600, 600),
    ],
)
def test_warmup_is_steps_or_a_share_of_them(warmup: float | None, steps: int, warmup_steps: int) -> None:
    config = TrainConfig(steps=steps, warmup=warmup)
    assert recipe(config).over(config, 1000).warmup_steps == warmup_steps


def test_a_warmup_longer_than_the_epochs() -> None:
    config = TrainConfig(epochs=1.0, warmup=11)
    with pytest.raises(ConfigError, match=r"^--warmup 11 is longer than the run of 10 steps\. Shorten it\."):
        recipe(config).over(config, 160)


@given(
    epochs=st.floats(1e-3, 50),
    epoch_count=st.integers(1, 10**7),
    batch_size=st.integers(1, 64),
    accumulation=st.integers(1, 16),
    world_size=st.integers(1, 64),
)
@settings(max_examples=150, deadline=None)
def test_the_steps_cover_the_epochs_and_no_step_is_too_many(
    epochs: float, epoch_count: int, batch_size: int, accumulation: int, world_size: int
) -> None:
    config = TrainConfig(epochs=epochs, batch_size=batch_size, accumulation=accumulation)
    made = recipe(config, world_size=world_size)
    course = made.over(config, epoch_count)
    wanted = epochs * epoch_count
    assert course.steps * made.per_step >= wanted - 1e-6 * wanted
    assert (course.steps - 1) * made.per_step < wanted
    assert 0 <= course.warmup_steps <= course.steps
    assert math.isclose(course.epochs, course.steps * made.per_step / epoch_count)


@pytest.mark.parametrize(
    ("asked", "world_size", "batch_size", "accumulation"),
    [
        # a run with steps of 16 sequences, of a folder, whose default is 4 of a rank
        ({}, 4, 4, 1),
        ({}, 2, 4, 2),
        ({}, 1, 4, 4),
        ({}, 8, 2, 1),
        ({}, 16, 1, 1),
        ({"batch_size": 6}, 2, 4, 2),
        ({"batch_size": 8, "accumulation": 2}, 1, 8, 2),
        ({"batch_size": 8, "accumulation": 2}, 2, 8, 1),
    ],
)
def test_a_run_that_goes_on_keeps_its_steps_on_any_number_of_ranks(
    asked: dict[str, Any], world_size: int, batch_size: int, accumulation: int
) -> None:
    config = TrainConfig(model="folder", **asked)
    made = recipe_for(config, positions=None, world_size=world_size, per_step=16)
    assert (made.batch_size, made.accumulation, made.per_step) == (batch_size, accumulation, 16)


def test_ranks_that_cannot_share_the_steps_of_a_run_are_refused() -> None:
    said = "has 16 sequences in a step, which 3 ranks cannot share. Use a number of ranks that divides 16"
    with pytest.raises(ConfigError, match=said):
        recipe_for(TrainConfig(model="folder"), positions=None, world_size=3, per_step=16)


def test_where_ranks_share_sequences_their_groups_share_the_steps() -> None:
    said = "which 3 data-parallel groups of 2 ranks cannot share. Use a number of data-parallel groups that divides 16"
    with pytest.raises(ConfigError, match=said):
        recipe_for(TrainConfig(model="folder", cp=2), positions=None, world_size=3, per_step=16)
    asked = TrainConfig(model="folder", cp=4, global_batch=7)
    said = "--global-batch 7 is not --batch-size 3 x --accumulation 1 x 2 data-parallel groups of 4 ranks. Leave one"
    with pytest.raises(ConfigError, match=said):
        recipe_for(asked, positions=None, world_size=2)
    made = recipe_for(TrainConfig(model="folder", cp=4, global_batch=8), positions=None, world_size=2)
    assert (made.batch_size, made.accumulation, made.per_step) == (4, 1, 8)
