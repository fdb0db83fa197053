"""Loops of accelerate with one line changed, beside accelerate itself, on one rank and on two."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file

from penstock.errors import ConfigError, EngineError
from penstock.integrations.accelerate import PenstockAccelerator
from tests.integrations.accelerate_loops import PLACEMENTS, Record, bert, fresh, nlp_example, small_example
from tests.lib.ranks import run_ranks

EXACT = 1e-6  # fp32: relative, and absolute


@pytest.fixture(scope="module")
def plain() -> Record:
    return nlp_example(None)


@pytest.mark.parametrize("placement", ["device", "cpu", "split", "nvme"])
def test_one_line_changes_nothing(placement: str, plain: Record) -> None:
    ours = nlp_example({"placement": PLACEMENTS[placement], "options": {"tile_bytes": 4096}})
    ours.assert_like(plain, EXACT)
    assert ours.metrics == plain.metrics


def test_fp16_has_no_scaler_and_counts_no_skipped_step() -> None:
    ours = nlp_example({"precision": "fp16", "options": {"initial_loss_scale": 2.0**19}}, accumulation=1, epochs=1)
    plain_rates = nlp_example(None, accumulation=1, epochs=1).rates
    skipped = sum(norm != norm or norm == float("inf") for norm in ours.norms)
    assert 0 < skipped < len(ours.norms)  # the scale was far too large at first, and was halved
    assert ours.rates[skipped:] == plain_rates[: len(ours.rates) - skipped]


def test_resumed_run_goes_on_as_accelerates_does(tmp_path: Path) -> None:
    arguments = {"placement": PLACEMENTS["split"]}
    nlp_example(arguments, save=tmp_path / "step_5", stop_after=6)
    names = {path.name for path in (tmp_path / "step_5").iterdir()}
    assert {"penstock", "scheduler.bin", "random_states_0.pkl"} <= names
    assert not {"model.safetensors", "optimizer.bin", "pytorch_model.bin"} & names  # nothing was gathered for them
    nlp_example(None, save=tmp_path / "plain" / "step_5", stop_after=6)
    theirs = nlp_example(None, resume=tmp_path / "plain" / "step_5")
    ours = nlp_example({"placement": PLACEMENTS["nvme"]}, resume=tmp_path / "step_5")
    ours.assert_like(theirs, EXACT)
    assert ours.metrics[-1] == theirs.metrics[-1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_states_go_over_to_another_world_size(before: int, after: int, tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    on_ranks(save_states, before, folder)
    plain = small_example(None, world_size=1)
    ours = on_ranks(resume_states, after, folder)
    for rank in ours:  # in the middle of an accumulation, and a rank that was not there counts as the others do
        assert rank.steps == 3
    torch.testing.assert_close(
        [sum(each) / after for each in zip(*(rank.losses for rank in ours), strict=True)],
        plain.losses[3:],
        rtol=EXACT,
        atol=EXACT,
    )


def on_ranks(work: Callable[[int, Path], Any], count: int, folder: Path) -> list[Any]:
    return [work(0, folder)] if count == 1 else run_ranks(work, count, folder, fresh=True)


def save_states(rank: int, folder: Path) -> None:
    small_example({"placement": PLACEMENTS["split"]}, save=folder)


def resume_states(rank: int, folder: Path) -> Record:
    return small_example({"placement": PLACEMENTS["cpu"], "stage": 2}, resume=folder)


def save_weights(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    fresh()
    accelerator = PenstockAccelerator(penstock={"placement": PLACEMENTS["cpu"]})
    torch.manual_seed(1)
    model: Any = bert()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    state = accelerator.get_state_dict(model)
    names = list(state)
    accelerator.unwrap_model(model).save_pretrained(
        folder / "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
        max_shard_size="4KB",
    )
    accelerator.save_model(model, folder / "model", max_shard_size="4KB")
    unwrapped: Any = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "gathered",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        max_shard_size="4KB",
    )
    if accelerator.is_main_process:
        with pytest.raises(EngineError, match=r"one rank cannot gather them\. Call it on every rank"):
            unwrapped.save_pretrained(folder / "alone")
    accelerator.wait_for_everyone()
    with pytest.raises(ConfigError, match="join_uneven_inputs"), accelerator.join_uneven_inputs([model]):
        pass
    accelerator.free_memory()
    return names, list(model.state_dict())


def with_hooks_of_diffusers(folder: Path) -> None:
    """As train_text_to_image.py: weights are saved on the main process alone, and loaded on each."""
    fresh()
    accelerator = PenstockAccelerator(penstock={"placement": PLACEMENTS["nvme"]})
    torch.manual_seed(1)
    model: Any = bert()
    loaded = []

    def save(models: list[Any], weights: list[Any], output: str) -> None:
        if accelerator.is_main_process:
            for each in models:
                accelerator.unwrap_model(each).save_pretrained(os.path.join(output, "unet"))
                weights.pop()

    def load(models: list[Any], source: str) -> None:
        for _ in range(len(models)):
            mine = models.pop()
            theirs = type(accelerator.unwrap_model(mine)).from_pretrained(source, subfolder="unet")
            mine.load_state_dict(theirs.state_dict())
            loaded.append({name: value.clone() for name, value in mine.state_dict().items()})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ids = torch.arange(6)[None]
    for _ in range(2):
        accelerator.backward(model(input_ids=ids, labels=torch.zeros(1, dtype=torch.long)).loss)
        optimizer.step()
        optimizer.zero_grad()
        if not loaded:
            accelerator.save_state(str(folder))
            saved = {name: accelerator.optimizer_of(model).full_param(p) for name, p in model.named_parameters()}
            loaded.append({})
    accelerator.load_state(str(folder))
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[1][name], saved[name]), name
        assert torch.equal(accelerator.optimizer_of(model).full_param(parameter), saved[name]), name
    accelerator.free_memory()


def stays_here(stage: int) -> bool:
    """Whether the first of two micro-batches stays on its rank."""
    fresh()
    accelerator = PenstockAccelerator(gradient_accumulation_steps=2, penstock={"stage": stage})
    model: Any = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    try:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            accelerator.optimizer_of(model).clip_grad_norm_(1.0)
    except EngineError as error:
        return "no_sync micro-batches are not reduced yet" in str(error)
    finally:
        accelerator.free_memory()
    return False


def accumulation() -> None:
    """The stage allows it or not; and ranks that accelerate does not see are refused."""
    assert (stays_here(1), stays_here(2)) == (True, False)
    fresh()
    PartialState()  # somebody asks for it first: on cpus accelerate counts one rank then, whatever the launcher says
    with pytest.raises(ConfigError, match=r"counts 1 processes.*has 2"):
        PenstockAccelerator(penstock={})
    fresh()


def on_two_ranks(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    """All of it in the same processes: most of a rank's time is its start."""
    plain = nlp_example(None)
    for placement, stage in (("cpu", 1), ("nvme", 3)):
        ours = nlp_example({"placement": PLACEMENTS[placement], "stage": stage})
        ours.assert_like(plain, EXACT)
        assert ours.metrics == plain.metrics, (placement, stage)
    saved = save_weights(rank, folder)
    with_hooks_of_diffusers(folder / "hooks")
    accumulation()
    return saved


def test_two_ranks(tmp_path: Path) -> None:
    """The loop, weights that are saved once, hooks of diffusers, and when gradients are reduced."""
    (first, names), (second, _) = run_ranks(on_two_ranks, 2, tmp_path, fresh=True)
    assert first == names
    assert second == []  # the other rank keeps nothing
    torch.manual_seed(1)
    expected = bert().state_dict()
    for folder in (tmp_path / "pretrained", tmp_path / "model", tmp_path / "gathered"):
        shards = sorted(folder.glob("model-*.safetensors"))
        assert len(shards) > 2
        found = {name: value for shard in shards for name, value in load_file(shard).items()}
        torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)
