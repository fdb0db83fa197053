"""The same YAML trains the same with `penstock train` as with `trl sft`, wherever state is."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import (
    COMMON,
    CPU,
    DEVICE,
    MIXED,
    NVME,
    STEPS,
    assert_same,
    assert_same_weights,
    checkpoints,
    ours,
    run_ranks,
    saved,
    steps_of,
    theirs,
)

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear"}
ASSISTANT = {"assistant_only_loss": True}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    # Rates that undo what was learned: the best is not the last.
    "lr_scheduler_type": "constant",
    "learning_rate": 3e-2,
    "warmup_steps": 0,
}


def settings_of(made: Path, rows: str, model: str = "marked", **changes: Any) -> dict[str, Any]:
    """Settings of TRL for a run of rows of some kind."""
    files = {"model_name_or_path": str(made / model), "dataset_name": str(made / rows)}
    return COMMON | files | changes


ONE_BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}

# name: rows, settings of TRL, placement
ROWS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "texts, split between tiers, decayed, two epochs in another order": (
        "texts",
        {"weight_decay": 0.3, "max_steps": -1, "num_train_epochs": 2, "seed": 11},
        MIXED,
    ),
    "chats on nvme, cut": ("chats", ASSISTANT | {"max_length": 60}, NVME),
    "completions of chats, another optimizer": (
        "chat completions",
        {"optim": "sgd", "learning_rate": 1.0, "optim_args": "momentum=0.9"},
        DEVICE,
    ),
    "wrapped": ("texts", {"packing": True, "packing_strategy": "wrapped", "max_length": 48}, CPU),
    # Packed rows are rows here, and flattened in TRL.
    "split into packed rows, evaluated unpacked": (
        "texts",
        EVALUATED
        | {"packing": True, "packing_strategy": "bfd_split", "max_length": 8, "eval_packing": False}
        | {"attn_implementation": "eager"},
        CPU,
    ),
    "without padding": ("completions", {"padding_free": True, "max_length": None}, CPU),
    # What dropout draws depends on the shape of a batch.
    "adapters on nvme, packed, evaluated": (
        "chats",
        EVALUATED | ASSISTANT | LORA | {"packing": True, "weight_decay": 0.3, "lora_dropout": 0.0},
        NVME,
    ),
    "no norm, one batch, no recomputation": (
        "completions",
        {"completion_only_loss": False, "max_grad_norm": 0.0, "gradient_checkpointing": False} | ONE_BATCH,
        MIXED,
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_same_file_trains_the_same(row: str, made: Path, tmp_path: Path) -> None:
    rows, changes, placement = ROWS[row]
    settings = settings_of(made, rows, **changes)
    found = ours(settings, tmp_path / "ours", penstock=placement)
    assert found.status == 0
    assert_same(found, theirs(settings, tmp_path / "theirs"))
    assert (found.out / "adapter_config.json").is_file() == ("adapters" in row)


def test_the_best_model_of_a_run_is_the_one_of_trl(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "chats", **ASSISTANT, **BEST)
    found, expected = ours(settings, tmp_path / "ours", penstock=CPU), theirs(settings, tmp_path / "theirs")
    evaluated = [line["eval_loss"] for line in expected.logs if "eval_loss" in line]
    assert evaluated.index(min(evaluated)) < len(evaluated) - 1, "the last is not the best"
    assert_same(found, expected, 1e-5)
    assert checkpoints(found.out) == checkpoints(expected.out)


def test_a_template_without_markers_is_learned_as_trl_learns_the_one_with_them(made: Path, tmp_path: Path) -> None:
    found = ours(settings_of(made, "chats", "plain", **ASSISTANT), tmp_path / "ours", penstock=CPU)
    assert_same(found, theirs(settings_of(made, "chats", "marked", **ASSISTANT), tmp_path / "theirs"))


def test_several_sources_are_those_of_a_mixture(made: Path, tmp_path: Path) -> None:
    """What `datasets:` names: the rows of one after those of the other."""
    (tmp_path / "more.jsonl").write_text('{"text": "one more sheep"}\n' * 5)
    files = [str(made / "texts" / "train.jsonl"), str(tmp_path / "more.jsonl")]
    settings = settings_of(made, "texts", datasets=[{"path": "json", "data_files": file} for file in files])
    del settings["dataset_name"]
    assert_same(ours(settings, tmp_path / "ours", penstock=CPU), theirs(settings, tmp_path / "theirs"))


# name: model, rows, settings, what both have of ours, and where state is in the second run
PLACED: dict[str, tuple[str, str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "a vocabulary that grows, packed": (
        "grows",
        "chats",
        ASSISTANT | {"packing": True},
        {},
        NVME | {"activations": "nvme"},
    ),
    "GPT-2 by muon": ("gpt2", "completions", {}, {"rule": "muon"}, CPU | {"activations": "cpu", "stage": 1}),
    "lion in 8 bits, bf16": (
        "tied",
        "texts",
        {"learning_rate": 1e-3, "max_grad_norm": 0.0, "bf16": True},
        {"rule": "lion", "options": {"state_dtype": "int8"}},
        MIXED | {"stage": 2},
    ),
    "adapters with dropout over 8 bits": (
        "tied",
        "chats",
        ASSISTANT | LORA | {"lora_dropout": 0.1},
        {"base": "int8"},
        NVME | {"stage": 1},
    ),
}


@pytest.mark.parametrize("row", PLACED)
def test_placement_changes_no_bit(row: str, made: Path, tmp_path: Path) -> None:
    model, rows, changes, common, placement = PLACED[row]
    settings = settings_of(made, rows, model, **changes)
    expected = ours(settings, tmp_path / "device", penstock={**DEVICE, **common})
    found = ours(settings, tmp_path / "elsewhere", penstock={**placement, **common})
    assert len(found.losses) == STEPS
    assert steps_of(found.logs) == steps_of(expected.logs)
    assert_same_weights(found.weights, expected.weights, 0)


# Two ranks, beside TRL's own, which are averaged by DistributedDataParallel


def all_of(rank: int, runs: dict[str, tuple[dict[str, Any], dict[str, Any]]], folder: Path) -> list[Any]:
    """Run each with ours and with TRL's in the same processes: most of a rank's time is its start."""
    os.environ.update(CI="1", HF_HUB_OFFLINE="1")
    found = []
    for name, (settings, placement) in runs.items():
        (folder / name).mkdir(exist_ok=True)
        os.chdir(folder / name)
        mine = ours(settings, folder / name / "ours", penstock=placement)
        found.append((mine, theirs(settings, folder / name / "theirs")))
    return found


RANKS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "packed adapters on nvme, a copy of the state on each": (
        "chats",
        ASSISTANT | LORA | {"packing": True, "lora_dropout": 0.0},
        NVME | {"dp_replicate": 2},
    ),
    "completions at stage 1, evaluated": (
        "completions",
        EVALUATED,
        MIXED | {"stage": 1},
    ),
}


def test_two_ranks_train_as_two_of_trl(made: Path, tmp_path: Path) -> None:
    runs = {
        name: (settings_of(made, rows, per_device_train_batch_size=1, **changes), dict(placement))
        for name, (rows, changes, placement) in RANKS.items()
    }
    (pairs, _) = run_ranks(all_of, 2, runs, tmp_path)
    for name, (found, expected) in zip(runs, pairs, strict=True):
        assert found.status == 0, name
        assert_same(found, expected)
        assert_same_weights(saved(tmp_path / name / "ours"), saved(tmp_path / name / "theirs"), 1e-6)


def test_bf16_learns_what_trl_learns(made: Path, tmp_path: Path) -> None:
    """A bf16 run rounds elsewhere than autocast does, so closely and not equally."""
    settings = settings_of(made, "texts", bf16=True)
    found, expected = ours(settings, tmp_path / "ours", penstock=CPU), theirs(settings, tmp_path / "theirs")
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=2e-2, atol=0)
    steps, wanted = (torch.tensor(steps_of(run.logs)) for run in (found, expected))
    torch.testing.assert_close(steps, wanted, rtol=5e-2, atol=0)
