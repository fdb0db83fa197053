"""Whether a run fits is said before it begins: of every memory, of the disk of its checkpoints, of activations."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.budgets import Room
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.fitting import about_fit, check_fits, of_checkpoints, plan_of, recomputes
from penstock.cli.training.model import Built, build
from penstock.cli.training.optimizer import preparation
from penstock.cli.training.recipe import recipe_for
from penstock.cli.training.sizes import StepSizes
from penstock.errors import MemoryBudgetError
from penstock.footprint import Footprint
from penstock.integrations.huggingface import find_model
from penstock.integrations.lora import Lora

SIZES = StepSizes(logits_bytes=2**20, largest_bytes=1, kept_bytes=600, recomputed_bytes=2**11)


def found_of(built: Built | None = None, **settings: Any) -> tuple[Footprint, TrainConfig, Built]:
    config = TrainConfig(precision="fp32", **settings)
    if built is None:
        source = find_model("tiny", seq_length=16)
        built = build(source, vocab_size=source.vocab_size, lora=None, chunks_loss=False, compiles=False, seed=0)
    recipe = recipe_for(config, positions=None, world_size=1)
    return preparation(built, config, recipe, "fp32").footprint(world_size=1), config, built


def test_activations_are_computed_again_where_they_do_not_fit() -> None:
    def room(available: int | None) -> Any:
        return SimpleNamespace(rooms=[Room("device", 1000, available), Room("host", 0, 0)])

    assert [recomputes("auto", SIZES, room(free)) for free in (1599, 1600, None)] == [True, False, False]
    assert not recomputes("auto", None, room(0)), "nobody knows how large they are"
    assert recomputes("on", SIZES, room(None))
    assert not recomputes("off", SIZES, room(0))


def test_a_run_that_fits_is_not_refused_and_one_that_does_not_is() -> None:
    found, config, built = found_of()
    check_fits(found, config)
    small, config, _ = found_of(built, device_bytes=1000)
    with pytest.raises(MemoryBudgetError, match=r"^The device needs [\d,]+ bytes"):
        check_fits(small, config)


def test_the_disk_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, _ = found_of()
    each = found.checkpoint_bytes
    monkeypatch.setattr("penstock.footprint.free_disk_bytes", lambda place: 3 * each)
    keep: dict[str, Any] = {"out": tmp_path / "out", "save_every": 5}
    check_fits(found, TrainConfig(**keep, keep=2))
    check_fits(found, TrainConfig(**keep | {"save_every": 0}, keep=99))
    with pytest.raises(MemoryBudgetError, match=rf"^4 checkpoints of {each:,} bytes take {4 * each:,}; '{tmp_path}'"):
        check_fits(found, TrainConfig(**keep, keep=3))
    with pytest.raises(MemoryBudgetError, match=r"^5 checkpoints"):
        check_fits(found, TrainConfig(**keep, keep=2, keep_best=True, eval_every=1))


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


def test_what_is_said_and_what_is_kept() -> None:
    found, _, _ = found_of()
    *rest, last = about_fit(found, SIZES, recomputed=False, chunked=False)
    assert rest == str(found).splitlines()
    assert last == "activations of a micro-batch, beside that: about 600 B (kept), logits 1.0 MiB"
    said = about_fit(found, SIZES, recomputed=True, chunked=True)[-1]
    assert said == "activations of a micro-batch, beside that: about 2.0 KiB (recomputed)"
    assert about_fit(found, None, recomputed=False, chunked=False) == rest
    assert plan_of(found) == {tier: found.at_rest.bytes(tier=tier) for tier in ("device", "cpu", "nvme")}
    assert plan_of(found)["cpu"] > 0
