"""Checkpoints of a Trainer with Penstock: folders that resume exactly, and files that Lightning reads."""

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

import penstock
from penstock.integrations.lightning import PenstockStrategy, consolidate
from tests.integrations.lightning_cases import (
    RELEASED,
    Net,
    assert_same_run,
    assert_same_weights,
    data,
    fit,
    made,
    trainer,
    weights,
)
from tests.lib.refusals import Refusal, refused, rows


def saving(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Settings of a Trainer that saves into a folder."""
    return {"callbacks": [ModelCheckpoint(dirpath=folder, **arguments)], "enable_checkpointing": True}


def ours(**arguments: Any) -> PenstockStrategy:
    return PenstockStrategy(options=RELEASED, **arguments)


@pytest.mark.parametrize(("precision", "state_dict_type"), [("32-true", "sharded"), ("bf16-mixed", "full")])
def test_a_resumed_run_is_the_run(tmp_path: Path, precision: Any, state_dict_type: Any) -> None:
    whole, first, second = made(), made(), Net()
    fit(whole, ours(), precision=precision, max_epochs=3)
    strategy = ours(state_dict_type=state_dict_type)
    fit(first, strategy, precision=precision, max_epochs=1, **saving(tmp_path, save_last=True))
    fit(second, ours(), ckpt_path=tmp_path / "last.ckpt", precision=precision, max_epochs=3)
    assert second.losses == whole.losses[len(first.losses) :]  # bit for bit
    assert_same_weights(weights(second), weights(whole), tolerance=0.0)


def test_the_best_of_several_stay_and_the_others_go_but_for_what_is_not_ours(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="val", save_top_k=2, save_last="link", filename="{epoch}")

    class Note(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                (Path(keeper.best_model_path) / "notes.txt").write_text("mine")

    run = trainer(ours(), max_epochs=4, callbacks=[keeper, Note()], enable_checkpointing=True)
    run.fit(made(), data(), data())
    folders = {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
    assert [path.name for path in (tmp_path / "epoch=0.ckpt").iterdir()] == ["notes.txt"]
    whole = {name for name in folders if (tmp_path / name / "checkpoint.json").is_file()}
    assert folders - whole == {"epoch=0.ckpt"}
    assert len(whole) == 2
    assert Path(keeper.best_model_path).name in whole
    assert Path(tmp_path, "last.ckpt").is_symlink()
    fit(Net(), ours(), ckpt_path=tmp_path / "last.ckpt", max_epochs=5)


def test_consolidate_makes_a_file_that_load_from_checkpoint_reads(tmp_path: Path) -> None:
    module = made(width=24)
    fit(module, ours(), max_epochs=1, **saving(tmp_path, save_last=True))
    consolidate(tmp_path / "last.ckpt", tmp_path / "model.ckpt")
    read = Net.load_from_checkpoint(tmp_path / "model.ckpt")
    assert_same_weights(weights(read), weights(module), tolerance=0.0)
    with pytest.raises(penstock.ConfigError, match="there already"):
        consolidate(tmp_path / "last.ckpt", tmp_path / "model.ckpt")


def test_a_run_of_ddp_goes_on_with_penstock(tmp_path: Path) -> None:
    plain, first, second = made(), made(), Net()
    fit(plain, "ddp", max_epochs=3, use_distributed_sampler=False)
    fit(first, "ddp", max_epochs=1, use_distributed_sampler=False, **saving(tmp_path, save_last=True))
    fit(second, ours(), ckpt_path=tmp_path / "last.ckpt", max_epochs=3)
    assert_same_weights(weights(second), weights(plain))


class Keeps(Net):
    """Adds to the checkpoint, and looks at its weights."""

    kept: Any = None
    shapes: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tensor": torch.arange(3), "pair": (1, "two")}
        self.shapes = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["mine"]


def test_hooks_keep_what_they_want_and_whole_states_are_given(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []

    class Asks(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.strategy.lightning_module_state_dict())
            with trainer.strategy.gathered():
                found.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    module, again, plain = made(Keeps), made(Keeps), made()
    how = saving(tmp_path, save_last=True, every_n_train_steps=3)
    how["callbacks"].append(Asks())
    seen = fit(module, ours(), max_epochs=1, **how)
    assert_same_run(seen, fit(plain, ours(), max_epochs=1), tolerance=0.0)  # saving in the middle changes nothing
    for state in found:
        assert_same_weights(state, weights(module), tolerance=0.0)
    assert module.shapes == {name: tuple(value.shape) for name, value in module.state_dict().items()}
    fit(again, ours(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert torch.equal(again.kept["tensor"], torch.arange(3))
    assert again.kept["pair"] == (1, "two")


def test_save_checkpoint_after_fit_is_weights_and_says_so(tmp_path: Path) -> None:
    module = made()
    run = trainer(ours(), max_epochs=1)
    run.fit(module, data())
    with pytest.warns(UserWarning, match="weights alone"):
        run.save_checkpoint(tmp_path / "after.ckpt")
    assert_same_weights(weights(Net.load_from_checkpoint(tmp_path / "after.ckpt")), weights(module), tolerance=0.0)
    with pytest.raises(KeyError, match="only the model"):
        fit(Net(), ours(), ckpt_path=tmp_path / "after.ckpt")


def test_the_finder_of_learning_rates_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    modules = []
    for strategy in (ours(), "auto"):
        module = made()
        finder = LearningRateFinder(num_training_steps=5, update_attr=False)
        fit(module, strategy, max_epochs=1, callbacks=[finder], default_root_dir=tmp_path)
        modules.append(module)
    assert not list(tmp_path.glob(".lr_find*"))
    assert_same_weights(weights(modules[0]), weights(modules[1]))


# What is refused


class OddHook(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"path": Path("here")}


def never_gathered(folder: Path) -> None:
    fit(made(), ours(state_dict_type="sharded"), **saving(folder, save_weights_only=True))


def a_file_of_code(folder: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": logging.getLogger()}, folder / "bad.ckpt")
    fit(made(), ours(), ckpt_path=folder / "bad.ckpt")


def of_another_model(folder: Path) -> None:
    fit(made(width=24), "auto", max_epochs=1, **saving(folder, save_last=True))
    fit(made(), ours(), ckpt_path=folder / "last.ckpt")


def of_no_trainer(folder: Path) -> None:
    module = made()
    optimizer = penstock.prepare(module, torch.optim.AdamW(module.parameters()), precision="fp32")
    optimizer.save(folder / "own")
    optimizer.close()
    fit(module, ours(), ckpt_path=folder / "own")


REFUSED = {
    "weights alone, never gathered": Refusal(never_gathered, "penstock.export"),
    "a file of code": Refusal(a_file_of_code, "tensors and plain values", penstock.CheckpointError),
    "weights of another model": Refusal(of_another_model, "of another shape"),
    "a folder of no trainer": Refusal(of_no_trainer, "optimizer.load", penstock.CheckpointError),
    "objects of hooks": Refusal(
        lambda folder: fit(made(OddHook), ours(), max_epochs=1, **saving(folder, save_last=True)),
        "['mine']['path'] is a PosixPath",
    ),
}


@rows(REFUSED)
def test_refused_by_name(row: Refusal, tmp_path: Path) -> None:
    refused(row, tmp_path)
