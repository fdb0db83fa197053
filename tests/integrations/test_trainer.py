"""`trainer_class(Trainer)` beside plain `Trainer`: the same loss, norm of the gradient, learning rate and weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, EvalPrediction, Trainer, TrainerCallback

import penstock
from penstock.integrations.transformers import trainer_class
from tests.integrations.trainers import (
    PLACEMENTS,
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
from tests.lib.ranks import run_ranks


@pytest.mark.parametrize(("name", "accumulation"), [("device", 3), ("cpu", 1), ("split", 1), ("nvme", 3)])
def test_fp32_is_plain_trainer_to_1e_6(name: str, accumulation: int, tmp_path: Path) -> None:
    train_both(tmp_path, prepare=PLACEMENTS[name], gradient_accumulation_steps=accumulation)


def beside_on_two(rank: int, out: Path, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for prepare, changes in rows:
        plain = plain_trainer(out, **changes)
        plain.train()
        ours = our_trainer(out, seed=rank, prepare=prepare, **changes)  # ranks begin with the first one's weights
        ours.train()
        assert_histories(ours, plain)
        assert_weights(weights(ours), weights(plain))
        assert abs(ours.evaluate()["eval_loss"] - plain.evaluate()["eval_loss"]) < 1e-5


def test_two_ranks_are_two_of_plain_trainer(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stage": 1}, {"gradient_accumulation_steps": 3, "average_tokens_across_devices": True}),
        ({"stage": 3}, {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}),
        (PLACEMENTS["nvme"], {"gradient_accumulation_steps": 2}),
    ]
    run_ranks(beside_on_two, 2, tmp_path, rows, fresh=True)


def test_plain_trainer_with_a_prepared_optimizer_clips_and_logs_the_norm(tmp_path: Path) -> None:
    """It logged a norm of 0 in every line, and clipped nothing."""
    plain = plain_trainer(tmp_path, gradient_accumulation_steps=2)
    plain.train()
    model = llama()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = penstock.prepare(model, torch.optim.AdamW(groups, lr=1e-2), precision="fp32")
    with_ours = plain_trainer(tmp_path, model, given={"optimizers": (optimizer, None)}, gradient_accumulation_steps=2)
    with_ours.train()
    assert_histories(with_ours, plain)


#: Several settings in a run, none of which says what another does; by what they are about.
SETTINGS: Mapping[str, dict[str, Any]] = {
    "the loss": {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "lr_scheduler_type": "cosine"},
    "no clipping": {"max_grad_norm": 0.0, "gradient_checkpointing": True, "optim": "adamw_torch_fused"},
    "rows": {
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
        "include_num_input_tokens_seen": "non_padding",
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-6,
    },
    "an epoch with a shorter last step": {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_training_arguments_do_what_they_do(name: str, tmp_path: Path) -> None:
    changes = SETTINGS[name]
    ours, plain = train_both(tmp_path, prepare=PLACEMENTS["cpu"], relative=2e-6, least=4, **changes)
    if name == "evaluation":
        losses = [torch.tensor(history(trainer, "eval_loss")) for trainer in (ours, plain)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        assert len(losses[0]) == 4
    if name == "rows":
        assert history(ours, "num_input_tokens_seen") == history(plain, "num_input_tokens_seen")


def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    def given(model: torch.nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))}

    model, same = llama(), llama()
    plain = plain_trainer(tmp_path, model, given=given(model))
    plain.train()
    ours = our_trainer(tmp_path, same, given=given(same))
    ours.train()
    assert_histories(ours, plain)
    assert_weights(weights(ours), weights(plain))


def test_metrics_predictions_and_callbacks(tmp_path: Path) -> None:
    def same(prediction: EvalPrediction) -> dict[str, float]:
        return {"same": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    class Steps(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            self.seen.append(type(given["optimizer"].optimizer).__name__)

        def on_optimizer_step(self, *_: Any, **given: Any) -> None:
            self.seen.append(type(given["model"]).__name__)

    counted = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "same"}
    runs = []
    for make in (plain_trainer, our_trainer):
        steps = Steps()
        callbacks = [EarlyStoppingCallback(2, 1.0), steps]
        trainer = make(tmp_path / make.__name__, given={"compute_metrics": same, "callbacks": callbacks}, **counted)
        trainer.train()
        prediction = trainer.predict(rows(5, seed=3))
        runs.append((trainer, torch.tensor(prediction.predictions), prediction.metrics["test_loss"], steps.seen))
    (plain, logits, loss, _), (ours, got, got_loss, seen) = runs
    assert plain.state.global_step == ours.state.global_step == 3  # nothing gets better by 1
    assert seen == ["Optimizer", "LlamaForCausalLM"] * 3
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
    assert abs(got_loss - loss) < 1e-5
    assert history(ours, "eval_same") == history(plain, "eval_same")


def test_another_trainer_takes_the_model_over(tmp_path: Path) -> None:
    """As where a cell of a notebook runs again: the trainer before may be gone, and its optimizer with it."""
    runs = []
    for make in (plain_trainer, our_trainer):
        model = llama()
        make(tmp_path, model).train()
        make(tmp_path, model, bf16=make is our_trainer).evaluate()
        last = make(tmp_path, model)
        torch.manual_seed(0)
        last.train()
        runs.append(last)
    plain, ours = runs
    assert_histories(ours, plain)
    ours.penstock.close()
    ours.accelerator.free_memory()
    assert not [name for name in vars(ours.model) if "penstock" in name]


def test_model_init_makes_a_model_for_each_train(tmp_path: Path) -> None:
    made = []
    for base in (Trainer, trainer_class(Trainer)):
        trainer = base(model_init=lambda: llama(), args=arguments(tmp_path), train_dataset=rows())
        trainer.train()
        made.append((trainer, trainer.optimizer.optimizer))
        trainer.train()
    (plain, _), (ours, first) = made
    assert_histories(ours, plain)
    with pytest.raises(penstock.EngineError, match="close"):
        first.locations()


def test_memory_that_runs_out_halves_the_batch(tmp_path: Path) -> None:
    class Greedy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()
            self.config, self.sizes = self.inner.config, []

        def forward(self, **inputs: Any) -> Any:
            self.sizes.append(len(inputs["input_ids"]))
            out = self.inner(**inputs)
            if len(inputs["input_ids"]) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return out

    changes = {"auto_find_batch_size": True, "remove_unused_columns": False}
    plain = plain_trainer(tmp_path, Greedy(), **changes)
    plain.train()
    ours = our_trainer(tmp_path, Greedy(), prepare=PLACEMENTS["cpu"], **changes)
    ours.train()
    assert ours.model.sizes[:2] == plain.model.sizes[:2] == [2, 1]
    assert_histories(ours, plain)
