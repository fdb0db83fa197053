"""How much matrices decay where nobody has said it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.cli.keys import values_in
from penstock.cli.options import options_of
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.optimizer import about_decay, parameter_groups
from penstock.cli.training.learning.optimizer_arguments import weight_decay_of
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.runfile import resolved_by, write_run_file
from penstock.cli.training.settings.learning import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_decoupled_weight_decay_is_on_unasked(name: str) -> None:
    """What is added to the gradient (L2) would be another thing."""
    assert weight_decay_of(TrainConfig(optimizer_name=name)) == (0.1 if name in ("adamw", "lion", "muon") else 0.0)
    assert weight_decay_of(TrainConfig(optimizer_name=name, weight_decay=0.3)) == 0.3
    assert weight_decay_of(TrainConfig(optimizer_name=name, weight_decay=0.0)) == 0.0


@pytest.mark.parametrize(("name", "decay", "said"), [("adamw", 0.1, "weight decay 0.1"), ("sgd", 0.0, "no weight")])
def test_groups_have_it(name: str, decay: float, said: str) -> None:
    model, config = nn.Linear(2, 3), TrainConfig(optimizer_name=name)
    assert [group["weight_decay"] for group in parameter_groups(model, config)] == [decay, 0.0]
    assert about_decay(model, config).startswith(said)


def test_an_optimizer_without_any_is_told_of_where_it_was_asked_for() -> None:
    model = nn.Linear(2, 3)
    said = "no weight decay: rprop has none"
    assert about_decay(model, TrainConfig(optimizer_name="rprop")) == said
    asked = TrainConfig(optimizer_name="rprop", weight_decay=0.1)
    assert about_decay(model, asked) == f"{said}, and --weight-decay is passed over"
    assert not any("weight_decay" in group for group in parameter_groups(model, asked))
    assert isinstance(torch.optim.Rprop(parameter_groups(model, asked)), torch.optim.Optimizer)


@pytest.mark.parametrize(("name", "written"), [("adamw", 0.1), ("sgd", 0.0), ("rprop", None)])
def test_the_file_of_a_run_says_it(name: str, written: float | None, tmp_path: Path) -> None:
    config = TrainConfig(optimizer_name=name, out=tmp_path)
    course = recipe_for(config, positions=None, world_size=1).over(config, 1000)
    path = write_run_file(config, resolved_by(config, course), world_size=1)
    assert values_in(path, options_of(TrainConfig)).get("weight_decay") == written
