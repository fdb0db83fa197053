"""What a run takes, held against what there is before anything is taken, in the words of the command line."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.blueprint import PrepareRequest
from penstock.cli.naming import in_options
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.fitting import about_fit, about_recompute, check_fits, disk_of, of_checkpoints, recomputes
from penstock.cli.training.learning.model import Built, build
from penstock.cli.training.learning.optimizer import preparation
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.sizes import StepSizes
from penstock.errors import MemoryBudgetError
from penstock.footprint import Footprint
from penstock.integrations.huggingface import find_model
from penstock.integrations.lora import Lora
from penstock.memory_budget import MemoryBudget, Need, Room
from penstock.tiers.tier import LocationReport
from tests.instruct import chat_file, instruct_folder

SIZES = StepSizes(logits_bytes=50, largest_bytes=10, kept_bytes=100, recomputed_bytes=20)


def found(*, available: int | None = 300, world_size: int = 1, lack: str | None = None) -> Footprint:
    rooms = [Room("device", 200, available, lack)]
    budget = MemoryBudget(
        device=Need({}),
        host=Need({}),
        files=Need({}),
        pinned_bytes=0,
        folders=[],
        is_shared=False,
        is_ahead=False,
        request=PrepareRequest(),
    )
    return Footprint(
        at_rest=LocationReport([]), budget=budget, rooms=rooms, checkpoint_bytes=1000, world_size=world_size
    )


class Usage(NamedTuple):
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how much is free on every disk."""
    return lambda nbytes: monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(nbytes))


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({}, 70),
        ({"save_every": 5, "keep": 3}, 4 * 2000 + 70),
        ({"keep_best": True, "eval_every": 1}, 2 * 2000 + 70),
        ({"save_every": 5, "keep": 1, "keep_best": True, "eval_every": 1}, 4 * 2000 + 70),
    ],
)
def test_checkpoints_and_the_model_have_to_fit_their_disk(
    asked: dict[str, Any], needed: int, tmp_path: Path, free: Callable[[int], None]
) -> None:
    config = TrainConfig(out=tmp_path / "not" / "yet", **asked)
    free(needed)
    disk = disk_of(found(world_size=2), config, 70)
    assert (disk.needed_bytes, disk.lack) == (needed, "")
    check_fits(found(world_size=2), disk)
    free(needed - 1)
    with pytest.raises(MemoryBudgetError, match=rf"^--out '.*yet' has {needed - 1:,} bytes free, 1 too few: "):
        check_fits(found(world_size=2), disk_of(found(world_size=2), config, 70))


def test_checkpoints_that_are_there_are_replaced(tmp_path: Path, free: Callable[[int], None]) -> None:
    free(10_000)
    config = TrainConfig(out=tmp_path, save_every=1, keep=2)
    held = tmp_path / "checkpoints" / "step-1"
    held.mkdir(parents=True)
    (held / "file").write_bytes(b"0" * 1500)
    assert disk_of(found(), config, 0).needed_bytes == 1500
    (held / "more").write_bytes(b"0" * 1500)
    assert disk_of(found(), config, 0).needed_bytes == 1000  # one is whole before another one goes


@pytest.mark.parametrize(
    ("available", "recomputed", "chunked", "said"),
    [
        (350, False, False, "100 B (kept), logits 50 B; 150 B are left: fits"),
        (349, False, False, "149 B are left: does not fit: --recompute on, a smaller --batch-size"),
        (300, False, True, "100 B (kept); 100 B are left: fits"),
        (210, True, True, "20 B (recomputed); 10 B are left: does not fit: a smaller --batch-size or a shorter"),
        (None, False, True, "about 100 B (kept)"),
    ],
)
def test_activations_are_held_against_what_the_device_has_left(
    available: int | None, recomputed: bool, chunked: bool, said: str, tmp_path: Path
) -> None:
    there = found(available=available)
    lines = about_fit(
        there, disk_of(there, TrainConfig(out=tmp_path), 7), SIZES, recomputed=recomputed, chunked=chunked
    )
    (line,) = (line for line in lines if line.startswith("activations"))
    assert said in line
    assert ("left" in line) == (available is not None)
    assert lines[-1].startswith("disk of --out: the model 7 B; ")


def test_several_ranks_are_told_of_one_by_one_and_lacks_once(tmp_path: Path) -> None:
    there = found(world_size=4, lack="Too little.")
    disk = disk_of(there, TrainConfig(out=tmp_path), 7)
    lines = about_fit(there, disk, SIZES, recomputed=False, chunked=True)
    assert lines[0] == "each of 4 ranks:"
    assert "Too little." not in lines
    with pytest.raises(MemoryBudgetError, match="Too little"):
        check_fits(there, disk)


@pytest.mark.parametrize(
    ("available", "sizes", "recomputed", "said"),
    [
        (300, SIZES, False, "activations are kept: kept they take about 100 B, and the device has 100 B beside state"),
        (299, SIZES, True, "activations are recomputed: kept they take about 100 B, and the device has 99 B beside"),
        (None, SIZES, False, "activations are kept: nobody knows what the device has"),
        (300, None, False, "activations are kept: nobody knows what they take"),
    ],
)
def test_what_auto_has_come_to_is_said(
    available: int | None, sizes: StepSizes | None, recomputed: bool, said: str
) -> None:
    there = found(available=available)
    assert recomputes("auto", sizes, there) is recomputed
    assert about_recompute(there, sizes, recomputed=recomputed).startswith(said)


def test_advice_names_options() -> None:
    text = (
        "Move state with Placement(optimizer='cpu', grads='cpu'), use more ranks, or lower Options(prefetch_bytes=...)."
    )
    assert in_options(text) == (
        "Move state with --optimizer cpu --grads cpu, use more ranks, or lower --prefetch-bytes."
    )


def test_a_dry_run_says_all_of_it_and_makes_nothing(
    penstock_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instruct_folder(tmp_path / "m")
    chat_file(tmp_path / "chat.jsonl")
    common = ["train", "--model", "m", "--data", "chat.jsonl", "--out", "o", "--dry-run", "--seq-length", "64"]
    outcome = penstock_command(*common, "--recompute", "auto", "--save-every", "5", "--precision", "fp32")
    assert outcome.exit_code == 0, outcome.err
    for said in (
        "50 rows (50 of messages)",
        "activations are kept: ",
        "are left: fits",
        "disk of --out: 3 checkpoints",
    ):
        assert said in outcome.out, said
    assert [file.name for file in (tmp_path / "o").iterdir()] == ["cache"]

    outcome = penstock_command(*common, "--resume", "nowhere")
    assert (outcome.exit_code, outcome.err) == (2, "penstock: error: nowhere does not exist.\n")

    outcome = penstock_command(*common, "--device-bytes", "64KiB")
    assert outcome.exit_code == 2
    assert "--device-bytes 65,536 gives it 65,536" in outcome.err
    assert "--grads cpu --params cpu" in outcome.err
    assert not re.search(r"Options\(|Placement\(|=\.\.\.", outcome.err + outcome.out)


def found_of(built: Built | None = None, **settings: Any) -> tuple[Footprint, TrainConfig, Built]:
    config = TrainConfig(precision="fp32", **settings)
    if built is None:
        source = find_model("tiny", seq_length=16)
        built = build(source, vocab_size=source.vocab_size, lora=None, chunks_loss=False, compiles=False, seed=0)
    recipe = recipe_for(config, positions=None, world_size=1)
    return preparation(built, config, recipe, "fp32").footprint(mesh={"dp_shard": 1}), config, built


def test_checkpoints_of_adapters_have_nothing_of_the_base() -> None:
    source = find_model("tiny", seq_length=16)
    lora = Lora(r=2)
    built = build(source, vocab_size=source.vocab_size, lora=lora, chunks_loss=False, compiles=False, seed=0)
    found, config, _ = found_of(built, lora="r=2")
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    assert of_checkpoints(found, config, built).checkpoint_bytes <= 16 * trained < found.checkpoint_bytes
    shared = replace(found, world_size=4)
    assert of_checkpoints(shared, config, built).checkpoint_bytes <= 4 * trained
    assert of_checkpoints(found, TrainConfig(), built) is found
