"""TRL's trainers on Penstock at two ranks, beside TRL's own on as many, which average by DistributedDataParallel."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from tests.integrations import trl_cases as cases
from tests.integrations.test_trl import CPU, LORA, NVME, SPLIT, placed
from tests.support import run_ranks

ROWS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "sft": ("sft", CPU, {}, 1e-6),
    "sft at stage 1": ("sft", SPLIT | {"stage": 1}, {}, 1e-6),
    "dpo with a reference that follows": (
        "dpo",
        SPLIT,
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.4},
        1e-6,
    ),
    "dpo of an adapter": ("dpo", NVME, LORA, 1e-6),
    "reward": ("reward", NVME, {}, 1e-6),
    "grpo with a reference": ("grpo", CPU, {"beta": 0.1}, 1e-5),
    "grpo gathered for each token": ("grpo", CPU, {"ds3_gather_for_generation": False}, 1e-5),
    "grpo of an adapter": ("grpo", SPLIT, LORA | {"beta": 0.1}, 1e-5),
}


def both(rank: int, name: str, prepare: dict[str, Any], folder: Path, options: dict[str, Any]) -> Any:
    """Run ours and theirs in the same processes: most of a rank's time is its start."""
    os.environ["CI"] = "1"  # else TRL tells its makers
    return cases.run(name, prepare, folder, **options), cases.run(name, None, folder, **options)


def precomputing(rank: int, folder: Path) -> Any:
    """Run both over data in files: of other data each rank of TRL's looks for those words in a cache of its own."""
    os.environ["CI"] = "1"
    outcomes = []
    for prepare in (CPU, None):
        rows = functools.partial(load_from_disk, str(folder / ("ours" if prepare else "theirs")))
        outcomes.append(cases.run("dpo", prepare, folder, data=rows, precompute_ref_log_probs=True))
    return outcomes


@pytest.mark.parametrize("row", ROWS)
def test_as_in_trl(row: str, tmp_path: Path) -> None:
    name, prepare, options, tolerance = ROWS[row]
    cases.folder_of(cases.causal(), tmp_path / "model")
    for ours, theirs in run_ranks(both, 2, name, prepare | placed(prepare), tmp_path, options, fresh=True):
        cases.same(ours, theirs, tolerance)


def test_a_policy_that_is_its_own_reference(tmp_path: Path) -> None:
    cases.folder_of(cases.causal(), tmp_path / "model")
    for name in ("ours", "theirs"):
        cases.preferences().save_to_disk(str(tmp_path / name))
    for ours, theirs in run_ranks(precomputing, 2, tmp_path, fresh=True):
        cases.same(ours, theirs, 1e-6)
