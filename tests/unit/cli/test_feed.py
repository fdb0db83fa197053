"""What a run reads says what it is: a checkpoint of other data, or of another order, is no place to go on from."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Shape, find_all, read_data
from penstock.cli.training.data.feed import DataFeed
from penstock.cli.training.recipe import recipe_for
from penstock.integrations.tokenizers import ByteTokenizer


@pytest.fixture
def feed(tmp_path: Path, text_folder: Path) -> Any:
    def make(ranks: Ranks | None = None, **settings: Any) -> DataFeed:
        given = {"data": (str(text_folder),), "seq_length": 32, "batch_size": 2, "steps": 3} | settings
        config = TrainConfig(**given)
        ranks = ranks or Ranks(0, 1, torch.device("cpu"))
        recipe = recipe_for(config, positions=None, world_size=ranks.world_size)
        shape = Shape(
            vocab_size=257, seq_length=recipe.seq_length, batch_size=recipe.batch_size, packed=True, holds_out=True
        )
        data = read_data(config, find_all(config), ByteTokenizer(), shape, tmp_path / "cache")
        return DataFeed(data, config, recipe.over(config, sum(data.counts)), ranks, pad_id=256)

    return make


def test_its_identity_is_of_what_is_read_and_in_which_order(feed: Any, text_folder: Path) -> None:
    identity = feed().identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity.keys() == {"seed", "seq_length", "sequences", "weights", "data"}
    assert feed().identity() == identity
    # What may be another one where a run goes on.
    assert feed(Ranks(1, 2, torch.device("cpu")), batch_size=1, accumulation=4, steps=9, lr=1.0).identity() == identity
    assert feed(seed=1).identity() == identity | {"seed": 1}
    other = feed(seq_length=16).identity()
    assert (other["seq_length"], other["data"]) == (16, identity["data"])
    assert other["sequences"] != identity["sequences"]
    weighted = feed(data=(f"{text_folder}:1",)).identity()
    assert (weighted["weights"], weighted["data"]) == ([1.0], identity["data"])
    (text_folder / "00.txt").write_text("the quick brown cat jumps over the lazy dog. " * 8 + "0\n")  # as long
    assert feed().identity()["data"] != identity["data"]


def test_ranks_share_a_step_and_the_count_of_its_labels(feed: Any) -> None:
    def steps(ranks: Ranks, **settings: Any) -> list[tuple[Any, int]]:
        made = feed(ranks, **settings)
        return [(batch, count) for batch, count in itertools.islice(made.training(0), 4)]

    alone = steps(Ranks(0, 1, torch.device("cpu")), batch_size=4)
    both = [steps(Ranks(rank, 2, torch.device("cpu"))) for rank in range(2)]
    for (whole, count), *halves in zip(alone, *both, strict=True):
        assert {half_count for _, half_count in halves} == {count}
        assert count == whole.label_count == sum(half.label_count for half, _ in halves)
        assert sorted(row.tolist() for half, _ in halves for row in half.labels) == sorted(whole.labels.tolist())


def test_a_compiled_model_sees_one_shape(feed: Any) -> None:
    made = feed(compile=True)
    shapes = {tuple(batch.input_ids.shape) for batch, _ in itertools.islice(made.training(0), 60)}
    assert shapes == {(2, 32)}
