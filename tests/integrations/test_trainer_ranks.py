"""Two ranks of a trainer beside two of plain `Trainer`: adapters, the best model, and what is saved."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.integrations.trainers import adapted, assert_weights, our_trainer, train_both, weights
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks

BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_strategy": "steps"}
PREPARE = {"placement": {"params": "nvme", "optimizer": "cpu", "nvme_path": str(disks()[0])}}


def best_of_two_ranks(rank: int, out: Path) -> None:
    changes = {"learning_rate": 0.1, "save_steps": 2} | BEST
    trainers = train_both(out, adapted, prepare=PREPARE, relative=1e-5, **changes)
    for trainer in trainers:
        trainer.save_model()
    torch.distributed.barrier()
    if rank == 0:
        name = "adapter_model.safetensors"
        assert_weights(load_file(out / "ours" / name), load_file(out / "plain" / name), relative=1e-5)
        assert not list((out / "ours").glob("model*"))
    ours = our_trainer(out / "whole", bf16=True, prepare=PREPARE, max_steps=2)
    ours.train()
    ours.save_model()
    whole = weights(ours)
    torch.distributed.barrier()
    if rank == 0:
        assert_weights(load_file(out / "whole" / "model.safetensors"), whole, relative=0)  # fp32 masters, of all ranks


def test_adapters_the_best_of_them_and_masters_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(best_of_two_ranks, 2, tmp_path, fresh=True)
