"""What a trainer saves and goes on from: weights for `from_pretrained`, checkpoints, the best one, adapters."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer

from penstock import export
from penstock.integrations.transformers import from_pretrained_on_meta, trainer_class
from penstock.integrations.transformers.resuming import is_whole
from tests.integrations.trainers import (
    ON_NVME,
    adapted,
    arguments,
    assert_histories,
    assert_weights,
    history,
    llama,
    our_trainer,
    plain_trainer,
    rows,
    train_both,
    weights,
)

SAVED = {"save_strategy": "steps", "save_steps": 2}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def state_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_saves_fp32_masters_unless_the_model_was_in_bf16(dtype: torch.dtype, tmp_path: Path) -> None:
    ours = our_trainer(tmp_path, llama().to(dtype), bf16=True, max_steps=2)
    ours.train()
    ours.save_model()
    saved = state_of(tmp_path)
    assert {value.dtype for value in saved.values()} == {dtype}
    if dtype == torch.float32:
        assert any((value != value.bfloat16().float()).any() for value in saved.values())
        assert_weights(saved, weights(ours), relative=0)


def test_checkpoints_have_weights_where_they_are_asked_for(tmp_path: Path) -> None:
    ours = our_trainer(tmp_path / "state", **SAVED)
    ours.train()
    beside = {"config.json", "generation_config.json", "training_args.bin", "trainer_state.json", "penstock"}
    assert files(tmp_path / "state" / "checkpoint-2") == beside | {"rng_state.pth"}
    assert "model.safetensors" in files(tmp_path / "state" / "checkpoint-6")  # the last one
    whole = trainer_class(type(ours), whole_weights=True)
    again = whole(llama(), arguments(tmp_path / "whole", **SAVED), train_dataset=rows())
    again.train()
    saved = state_of(tmp_path / "whole" / "checkpoint-2")
    export(tmp_path / "state" / "checkpoint-2", tmp_path / "out", dtype="fp32")
    assert_weights(state_of(tmp_path / "out"), saved, relative=0)


@pytest.mark.parametrize(("strategy", "expected"), [("end", False), ("every_save", True), ("checkpoint", True)])
def test_what_is_pushed_has_weights_and_is_whole(
    strategy: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool, bool]] = []

    def push(trainer: Any, folder: str) -> None:
        pushed.append((Path(folder).name, bool(state_of(Path(folder))), is_whole(Path(folder))))

    for name in ("init_hf_repo", "push_to_hub", "_finish_current_push"):
        monkeypatch.setattr(Trainer, name, lambda *args, **given: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    changes = {"push_to_hub": True, "hub_strategy": strategy, "save_total_limit": 1, **SAVED}
    our_trainer(tmp_path, **changes).train()
    assert [name for name, _, _ in pushed] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(has == (expected or name == "checkpoint-6") for name, has, _ in pushed)
    assert all(whole for _, _, whole in pushed) or "checkpoint" not in strategy
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]


# Going on


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    plain = plain_trainer(tmp_path / "plain", **SAVED)
    plain.train()
    whole = our_trainer(tmp_path / "ours", prepare={"placement": ON_NVME}, **SAVED)
    whole.train()
    resumed = our_trainer(tmp_path / "ours", seed=5, prepare={"placement": {"optimizer": {"device": 0.5, "cpu": 0.5}}})
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert history(resumed) == history(whole)
    assert_histories(resumed, plain)
    assert_weights(weights(resumed), weights(whole), relative=0)


def test_a_checkpoint_of_plain_trainer_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = plain_trainer(tmp_path, **SAVED)
    plain.train()
    ours = our_trainer(tmp_path, seed=5)
    with caplog.at_level(logging.WARNING):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "every rank reads all of its optimizer.pt" in caplog.text
    assert_histories(ours, plain)
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # prepared, it takes the weights too
    assert_histories(ours, plain)
    assert_weights(weights(ours), weights(plain))


def test_a_checkpoint_of_weights_alone_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    our_trainer(tmp_path, save_only_model=True, **SAVED).train()
    assert not (tmp_path / "checkpoint-2" / "penstock").exists()
    ours = our_trainer(tmp_path, seed=5)
    with caplog.at_level(logging.WARNING):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "weights and no state of an optimizer" in caplog.text
    assert [round(step[2], 6) for step in history(ours)] == [0.0, 0.005, 0.0, 0.005, 0.01, 0.0075]


# The best


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(save_only_model: bool, tmp_path: Path) -> None:
    """That of adapters: test_trainer_ranks.py."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.1} | SAVED
    plain = plain_trainer(tmp_path / "plain", save_only_model=save_only_model, **best)
    ours = our_trainer(tmp_path / "ours", save_only_model=save_only_model, **best)
    for trainer in (plain, ours):
        trainer.train()
    assert Path(ours.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
    assert Path(ours.state.best_model_checkpoint).name != "checkpoint-6"  # not what is in memory anyway
    assert_weights(weights(ours), weights(plain), relative=1e-5)
    assert abs(ours.evaluate()["eval_loss"] - ours.state.best_metric) < 1e-6


# Adapters


def test_adapters_are_saved_alone_and_gone_on_with(tmp_path: Path) -> None:
    _, plain = train_both(tmp_path, adapted, prepare={"placement": ON_NVME}, **SAVED)
    saved = tmp_path / "ours" / "checkpoint-4"
    kept = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert kept <= files(saved)
    assert not list(saved.glob("model*.safetensors"))
    assert_weights(state_of(saved), state_of(tmp_path / "plain" / "checkpoint-4"))
    assert isinstance(PeftModel.from_pretrained(llama(), saved), PeftModel)
    resumed = our_trainer(tmp_path / "ours", adapted(), **SAVED)
    resumed.train(resume_from_checkpoint=str(saved))
    assert_histories(resumed, plain)


# Without values


def test_a_model_without_values_is_read_where_it_rests(tmp_path: Path) -> None:
    llama(3).save_pretrained(tmp_path / "base")
    loaded = our_trainer(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    loaded.train()
    empty = from_pretrained_on_meta(tmp_path / "base")
    assert all(parameter.is_meta for parameter in empty.parameters())
    ours = our_trainer(tmp_path, empty, prepare={"placement": ON_NVME}, **SAVED)
    ours.train()
    assert history(ours) == history(loaded)
    again = our_trainer(tmp_path, from_pretrained_on_meta(tmp_path / "base"), prepare={"placement": ON_NVME})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert history(again) == history(loaded)


# Evaluation without training


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_before_training_changes_nothing_of_it(bf16: bool, tmp_path: Path) -> None:
    plain, ours = plain_trainer(tmp_path, bf16=bf16), our_trainer(tmp_path, bf16=bf16)
    losses = [[t.evaluate()["eval_loss"], t.predict(rows(3)).metrics["test_loss"]] for t in (plain, ours)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-2 if bf16 else 1e-6, atol=0)
    ours.save_model(str(tmp_path / "saved"))
    assert_weights(state_of(tmp_path / "saved"), dict(llama().named_parameters()), relative=0)
    alone = our_trainer(tmp_path, bf16=bf16)
    for trainer in (ours, alone):
        torch.manual_seed(0)  # evaluation draws numbers too, and the order of rows is drawn
        trainer.train()
    assert history(ours) == history(alone)


def test_a_trainer_without_training_data_takes_no_memory_for_it_also_without_values(tmp_path: Path) -> None:
    plain = plain_trainer(tmp_path, given={"train_dataset": None})
    llama().save_pretrained(tmp_path / "base")
    empty = from_pretrained_on_meta(tmp_path / "base")
    ours = our_trainer(tmp_path, empty, prepare={"placement": ON_NVME}, given={"train_dataset": None})
    assert abs(ours.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) < 1e-6
    assert not {"exp_avg", "grad", "master"} & {row.kind for row in ours.penstock.locations().rows}
    ours.save_model()
    assert_weights(state_of(tmp_path), dict(llama().named_parameters()), relative=0)
