"""TRL's trainers on Penstock, beside TRL's own: every number that they log, and the weights that they save."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from penstock.integrations import trl
from tests.integrations import trl_cases as cases
from tests.lib.memory import disks

CPU = {"placement": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}}
SPLIT = {"placement": {"params": {"cpu": 0.5, "device": 0.5}, "grads": "cpu", "optimizer": {"device": 0.6, "cpu": 0.4}}}
NVME = {"placement": {"params": "nvme", "grads": "cpu", "optimizer": "nvme"}}
LORA = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}

#: By name: the trainer, where state is, and settings; rows that sample are near to theirs within 1e-5. Rows of SFT of
#: every kind: tests/train/test_as_trl.py. More on two ranks: test_trl_ranks.py.
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 1}
SAMPLING = ("grpo", "rloo", "distillation")


ROWS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft by dft": ("sft", CPU, {"loss_type": "dft", "gradient_checkpointing": False}),
    "dpo with the reference's words known before": ("dpo", NVME, {"precompute_ref_log_probs": True}),
    "kto": ("kto", CPU, {}),
    "reward of an adapter": ("reward", SPLIT, LORA),
    "grpo of an adapter, evaluated between its steps": (
        "grpo",
        NVME,
        LORA | {"beta": 0.1, "eval_dataset": cases.prompts(4), "eval_strategy": "steps", "eval_steps": 1},
    ),
    "grpo with a reference that follows, and a head in fp32": (
        "grpo",
        SPLIT,
        FOLLOWS | {"beta": 0.1, "cast_lm_head_to_fp32": True},
    ),
    "grpo rewarded by a model": (
        "grpo",
        CPU,
        {"reward_funcs": [cases.scoring(), cases.likes], "reward_processing_classes": [cases.tokenizer(), None]},
    ),
    "grpo by continuous batching": (
        "grpo",
        CPU,
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
        },
    ),
    "rloo": ("rloo", CPU, {}),
    "distillation": ("distillation", CPU, {}),
}


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters go after each use, as on a device: else one rank on a cpu reads them in place."""
    monkeypatch.setenv("PENSTOCK_DEBUG_RELEASE", "1")
    monkeypatch.setenv("CI", "1")  # else TRL tells its makers
    monkeypatch.setattr(trl, "GATHER_BYTES", 8192)  # several batches of parameters


def placed(prepare: dict[str, Any]) -> dict[str, Any]:
    return {"placement": prepare["placement"] | {"nvme_path": str(disks()[0])}}


@pytest.mark.parametrize("row", ROWS)
def test_as_in_trl(row: str, tmp_path: Path) -> None:
    name, prepare, options = ROWS[row]
    if name == "distillation" and cases.ON_GPUS_ALONE:
        pytest.skip("TRL 1.15 distils by kernels for GPUs alone")
    cases.beside(name, placed(prepare), tmp_path, 1e-5 if name in SAMPLING else 1e-6, **options)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_resumed_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    cases.folder_of(cases.causal(), tmp_path / "model")
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    outcomes = []
    for prepare in (placed(SPLIT), None):
        out = tmp_path / ("plain" if prepare is None else "ours")
        straight = cases.run(name, prepare, tmp_path, **saving)
        again = cases.run(name, prepare, tmp_path, {"resume_from_checkpoint": str(out / "checkpoint-2")}, **saving)
        torch.testing.assert_close(again.weights, straight.weights, rtol=0, atol=0)
        losses = [[line["loss"] for line in run.logs if "loss" in line] for run in (again, straight)]
        assert losses[0] == losses[1]
        outcomes.append(again)
    cases.same(*outcomes, 1e-6)


def test_a_policy_is_placed_by_the_time_that_it_is_its_own_reference(tmp_path: Path) -> None:
    """TRL computes the reference's words in its constructor, when a model lies where it was loaded."""
    cases.folder_of(cases.causal(), tmp_path / "model")
    made = cases.trainer_of("dpo", placed(NVME), tmp_path, precompute_ref_log_probs=True)
    assert made.penstock.locations().bytes(kind="param", tier="nvme")
    assert made.ref_model is None
