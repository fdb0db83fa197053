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


def saving(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Settings of a Trainer that saves into a folder."""
    return {"callbacks": [ModelCheckpoint(dirpath=folder, **arguments)], "enable_checkpointing": True}


def ours(**arguments: Any) -> PenstockStrategy:
    return PenstockStrategy(options=RELEASED, **arguments)


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resumed_run_is_the_run(tmp_path: Path, precision: Any, state_dict_type: Any) -> None:
    whole, first, second = made(), made(), Net()
    fit(whole, ours(), precision=precision, max_epochs=3)
    strategy = ours(state_dict_type=state_dict_type)
    fit(first, strategy, precision=precision, max_epochs=1, **saving(tmp_path, save_last=True))
    fit(second, ours(), ckpt_path=tmp_path / "last.ckpt", precision=precision, max_epochs=3)
    assert second.losses == whole.losses[len(first.losses) :]  # bit for bit
    assert_same_weights(weights(second), weights(whole), tolerance=0.0)


def test_last_is_found_and_resumed_with_another_placement(tmp_path: Path) -> None:
    plain, first, second = made(), made(), Net()
    seen = fit(plain, "auto", max_epochs=3)
    fit(first, ours(stage=1), max_epochs=1, **saving(tmp_path, save_last=True))
    placement = penstock.Placement(optimizer="cpu", params={"device": 0.5, "cpu": 0.5})
    resumed = fit(second, ours(placement=placement), ckpt_path="last", max_epochs=3, **saving(tmp_path, save_last=True))
    assert_same_weights(weights(second), weights(plain))
    assert resumed.lr == pytest.approx(seen.lr[8:])


def test_the_best_of_several_stay_and_the_others_go(tmp_path: Path) -> None:
    module = made()
    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="val", save_top_k=2, save_last="link", filename="{epoch}")
    run = trainer(ours(), max_epochs=4, callbacks=[keeper], enable_checkpointing=True)
    run.fit(module, data(), data())
    folders = sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink())
    assert len(folders) == 2
    assert Path(keeper.best_model_path).name in folders
    assert Path(tmp_path, "last.ckpt").is_symlink()
    assert all((tmp_path / name / "checkpoint.json").is_file() for name in folders)
    again = Net()
    fit(again, ours(), ckpt_path=tmp_path / "last.ckpt", max_epochs=5)


def test_what_is_removed_is_ours(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(dirpath=tmp_path, save_top_k=1, filename="{epoch}")

    class Note(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                (Path(keeper.best_model_path) / "notes.txt").write_text("mine")

    run = trainer(ours(), max_epochs=2, callbacks=[keeper, Note()], enable_checkpointing=True)
    run.fit(made(), data())
    assert [path.name for path in (tmp_path / "epoch=0.ckpt").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_alone_are_a_file_of_lightnings(tmp_path: Path, precision: Any) -> None:
    module = made()
    fit(module, ours(), precision=precision, max_epochs=1, **saving(tmp_path, save_weights_only=True, filename="w"))
    read = Net.load_from_checkpoint(tmp_path / "w.ckpt")
    assert read.hparams == module.hparams
    assert_same_weights(weights(read), weights(module), tolerance=0.0)


def test_weights_alone_where_they_are_never_gathered(tmp_path: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=r"penstock\.export"):
        fit(made(), ours(state_dict_type="sharded"), **saving(tmp_path, save_weights_only=True))


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


def test_a_file_that_holds_code_is_not_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": logging.getLogger()}, tmp_path / "bad.ckpt")
    with pytest.raises(penstock.CheckpointError, match="tensors and plain values"):
        fit(made(), ours(), ckpt_path=tmp_path / "bad.ckpt")


def test_weights_of_another_model(tmp_path: Path) -> None:
    fit(made(width=24), "auto", max_epochs=1, **saving(tmp_path, save_last=True))
    module = made()
    with pytest.raises(penstock.ConfigError, match="of another shape"):
        fit(module, ours(), ckpt_path=tmp_path / "last.ckpt")


def test_a_folder_that_no_trainer_saved(tmp_path: Path) -> None:
    module = made()
    optimizer = penstock.prepare(module, torch.optim.AdamW(module.parameters()), precision="fp32")
    optimizer.save(tmp_path / "own")
    optimizer.close()
    with pytest.raises(penstock.CheckpointError, match=r"optimizer\.load"):
        fit(module, ours(), ckpt_path=tmp_path / "own")


class Keeps(Net):
    """Adds to the checkpoint, and looks at its weights."""

    kept: Any = None
    shapes: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tensor": torch.arange(3), "pair": (1, "two")}
        self.shapes = {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["mine"]


def test_hooks_keep_what_they_want(tmp_path: Path) -> None:
    module, again = made(Keeps), made(Keeps)
    fit(module, ours(), max_epochs=1, **saving(tmp_path, save_last=True))
    assert module.shapes == {name: tuple(value.shape) for name, value in module.state_dict().items()}
    fit(again, ours(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert torch.equal(again.kept["tensor"], torch.arange(3))
    assert again.kept["pair"] == (1, "two")


def test_hooks_that_keep_objects_are_named(tmp_path: Path) -> None:
    class Odd(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"path": Path("here")}

    with pytest.raises(penstock.ConfigError, match=r"\['mine'\]\['path'\] is a PosixPath"):
        fit(made(Odd), ours(), max_epochs=1, **saving(tmp_path, save_last=True))


def test_save_checkpoint_after_fit_is_weights_and_says_so(tmp_path: Path) -> None:
    module = made()
    run = trainer(ours(), max_epochs=1)
    run.fit(module, data())
    with pytest.warns(UserWarning, match="weights alone"):
        run.save_checkpoint(tmp_path / "after.ckpt")
    assert_same_weights(weights(Net.load_from_checkpoint(tmp_path / "after.ckpt")), weights(module), tolerance=0.0)
    with pytest.raises(KeyError, match="only the model"):
        fit(Net(), ours(), ckpt_path=tmp_path / "after.ckpt")


def test_the_strategys_state_dict_is_whole(tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []

    class Asks(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.strategy.lightning_module_state_dict())
            with trainer.strategy.gathered():
                found.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    module = made()
    fit(module, ours(), max_epochs=1, callbacks=[Asks()])
    for state in found:
        assert_same_weights(state, weights(module), tolerance=0.0)


def test_the_finder_of_learning_rates_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    modules = []
    for strategy in (ours(), "auto"):
        module = made()
        finder = LearningRateFinder(num_training_steps=5, update_attr=False)
        fit(module, strategy, max_epochs=1, callbacks=[finder], default_root_dir=tmp_path)
        modules.append(module)
    assert not list(tmp_path.glob(".lr_find*"))
    assert_same_weights(weights(modules[0]), weights(modules[1]))


def test_two_runs_see_the_same(tmp_path: Path) -> None:
    """Saving in the middle changes nothing."""
    saved, plain = made(), made()
    every = saving(tmp_path, every_n_train_steps=3, save_top_k=-1)
    assert_same_run(fit(saved, ours(), **every), fit(plain, ours()), tolerance=0.0)
    assert len(list(tmp_path.iterdir())) == 5
