"""Two ranks of a trainer beside two of plain `Trainer`: adapters, the best model, and what is saved."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.integrations.trainers import assert_histories, assert_weights, llama, our_trainer, plain_trainer, weights
from tests.lib.memory import disks
from tests.support import run_ranks

BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_strategy": "steps"}
PREPARE = {"placement": {"params": "nvme", "optimizer": "cpu", "nvme_path": str(disks()[0])}}


def adapted() -> Any:
    torch.manual_seed(1)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def train_both(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    changes = {"learning_rate": 0.1, "save_steps": 2, "bf16": False} | BEST
    plain = plain_trainer(out / "plain", adapted(), **changes)
    plain.train()
    ours = our_trainer(out / "ours", adapted(), prepare=PREPARE, **changes)
    ours.train()
    assert_histories(ours, plain)
    assert_weights(weights(ours), weights(plain), relative=1e-5)
    for trainer in (plain, ours):
        trainer.save_model()
    torch.distributed.barrier()
    if rank == 0:
        name = "adapter_model.safetensors"
        assert_weights(load_file(out / "ours" / name), load_file(out / "plain" / name), relative=1e-5)
        assert not list((out / "ours").glob("model*"))


def test_adapters_and_the_best_of_them(tmp_path: Path) -> None:
    run_ranks(train_both, 2, tmp_path, fresh=True)


def save_whole(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    ours = our_trainer(out, bf16=True, prepare=PREPARE)
    ours.train()
    ours.save_model()
    whole = weights(ours)
    torch.distributed.barrier()
    if rank == 0:
        assert_weights(load_file(out / "model.safetensors"), whole, relative=0)


def test_fp32_masters_are_saved_from_all_ranks(tmp_path: Path) -> None:
    run_ranks(save_whole, 2, tmp_path, fresh=True)
