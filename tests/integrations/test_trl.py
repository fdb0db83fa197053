"""TRL's trainers on Penstock, beside TRL's own: every number that they log, and the weights that they save."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from tests.integrations import trl_cases as cases
from tests.support import disks

CPU = {"placement": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}}
SPLIT = {"placement": {"params": {"cpu": 0.5, "device": 0.5}, "grads": "cpu", "optimizer": {"device": 0.6, "cpu": 0.4}}}
NVME = {"placement": {"params": "nvme", "grads": "cpu", "optimizer": "nvme"}}
LORA = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}

SAME_TO_1E_6 = {
    "sft": ("sft", CPU, {}),
    "sft of a tied head, packed": ("sft", SPLIT, {"model": cases.tied, "packing": True, "packing_strategy": "wrapped"}),
    "sft padding-free": ("sft", CPU, {"packing": True}),
    "sft of completions alone": ("sft", NVME, {"data": cases.completions}),
    "sft of the assistant alone": ("sft", SPLIT, {"data": cases.talks, "assistant_only_loss": True}),
    "sft by dft": ("sft", CPU, {"loss_type": "dft", "gradient_checkpointing": False}),
    "sft with smooth labels": ("sft", CPU, {"label_smoothing_factor": 0.1}),
    "sft of an adapter": ("sft", NVME, LORA),
    "dpo": ("dpo", CPU, {}),
    "dpo with the reference's words known before": ("dpo", NVME, {"precompute_ref_log_probs": True}),
    "dpo with a reference that follows": (
        "dpo",
        SPLIT,
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.4},
    ),
    "dpo of an adapter": ("dpo", CPU, LORA),
    "kto": ("kto", CPU, {}),
    "reward": ("reward", SPLIT, {}),
    "reward of an adapter": ("reward", CPU, LORA),
}
SAME_TO_1E_5 = {
    "grpo": ("grpo", CPU, {}),
    "grpo with a reference": ("grpo", NVME, {"beta": 0.1}),
    "grpo twice over each answer": ("grpo", SPLIT, {"num_iterations": 2, "max_steps": 3}),
    "grpo of several steps' answers": (
        "grpo",
        CPU,
        {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "scale_rewards": "batch", "beta": 0.1},
    ),
    "grpo of an adapter": ("grpo", NVME, LORA | {"beta": 0.1}),
    "grpo with a reference that follows": (
        "grpo",
        SPLIT,
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
    "rloo": ("rloo", CPU, {}),
    "distillation": ("distillation", CPU, {}),
}


@pytest.fixture(autouse=True)
def _released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters go after each use, as on a device: else one rank on a cpu reads them in place."""
    monkeypatch.setenv("PENSTOCK_DEBUG_RELEASE", "1")


def placed(prepare: dict[str, Any]) -> dict[str, Any]:
    return {"placement": prepare["placement"] | {"nvme_path": str(disks()[0])}}


@pytest.mark.parametrize("row", SAME_TO_1E_6)
def test_as_in_trl(row: str, tmp_path: Path) -> None:
    name, prepare, options = SAME_TO_1E_6[row]
    cases.beside(name, placed(prepare), tmp_path, **options)


@pytest.mark.parametrize("row", SAME_TO_1E_5)
def test_generating_as_in_trl(row: str, tmp_path: Path) -> None:
    name, prepare, options = SAME_TO_1E_5[row]
    cases.beside(name, placed(prepare), tmp_path, 1e-5, **options)
