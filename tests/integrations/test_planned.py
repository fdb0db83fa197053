"""A plan goes through `Trainer` to `prepare`: the same run as with its arguments by hand."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from penstock import Options, Placement
from penstock.errors import ConfigError
from penstock.integrations.transformers import trainer_class
from tests.integrations import trainers
from tests.lib.plans import SMALL, small

BY_HAND: dict[str, Any] = {
    "placement": SMALL.placement,
    "overlap": SMALL.overlap,
    "options": SMALL.options,
    "precision": "fp32",
}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    file = tmp_path / "plan.json"
    file.write_text(SMALL.to_json())
    return str(file)


def trained(out: Path, prepare: dict[str, Any], **where: Any) -> Any:
    kind = trainer_class(Trainer, **prepare, **where)
    args = trainers.arguments(out, max_steps=2)
    run = kind(model=trainers.llama(), args=args, train_dataset=trainers.rows())
    run.train()
    return run


def test_a_file_of_trainers_arguments_names_a_plan(plan: str, tmp_path: Path) -> None:
    config = tmp_path / "penstock.yaml"
    config.write_text(f"placement: auto\nplan: {plan}\n")
    by_plan = trained(tmp_path / "plan", {}, config=config)
    by_hand = trained(tmp_path / "hand", BY_HAND)
    assert by_plan.penstock.plan == SMALL
    assert trainers.history(by_plan) == trainers.history(by_hand)
    trainers.assert_weights(trainers.weights(by_plan), trainers.weights(by_hand), relative=0)
    placed = small(placement=Placement(optimizer="nvme", nvme_path=str(tmp_path)), options=Options())
    run = trained(tmp_path / "out", {"placement": "auto", "plan": placed})
    run.save_model(str(tmp_path / "saved"))  # the plan's are the folders that are used
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_plan_that_recomputes_says_how_to_tell_a_model_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Call model\.gradient_checkpointing_enable\(\) before prepare\(\)"):
        trained(tmp_path / "out", {"placement": "auto", "plan": small(recompute=True)})
    model = trainers.llama()
    model.gradient_checkpointing_enable()
    kind = trainer_class(Trainer, placement="auto", plan=small(recompute=True))
    run = kind(model=model, args=trainers.arguments(tmp_path, max_steps=1), train_dataset=trainers.rows())
    run.train()
    assert run.penstock.plan.recompute
