"""Two ranks: fits, manual loops, evaluation and checkpoints beside DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import penstock
from penstock.integrations.lightning import PenstockStrategy
from tests.integrations.lightning_cases import (
    PLACEMENTS,
    RELEASED,
    SPLIT,
    Breaks,
    Manual,
    Net,
    assert_same_run,
    assert_same_weights,
    data,
    fit,
    made,
    trainer,
    weights,
)
from tests.lib.ranks import RANK_TIMEOUT, run_ranks

TWO: dict[str, Any] = {"devices": 2}


def run_two(work: Any, *args: Any) -> list[Any]:
    return run_ranks(work, 2, *args, timeout=3 * RANK_TIMEOUT, fresh=True)


class Asks(Net):
    """Has the whole state gathered."""

    gathered: Any = None

    def on_train_end(self) -> None:
        self.gathered = self.trainer.strategy.lightning_module_state_dict()


def beside_ddp(rank: int) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, **TWO}
    plain = made()
    expected = fit(plain, "ddp", **settings)
    for stage, name in ((0, "device"), (1, "cpu"), (3, "split"), (2, "nvme")):
        ours = made() if rank == 0 else Net(lr=1e-2)  # the first rank's values are everybody's
        placement = penstock.Placement(**PLACEMENTS[name])
        seen = fit(ours, PenstockStrategy(stage=stage, placement=placement, options=RELEASED), **settings)
        assert_same_run(seen, expected)
        assert_same_weights(weights(ours), weights(plain))
    near = made(Asks)
    fit(near, PenstockStrategy(options=RELEASED, precision="bf16"), **settings)
    assert_same_weights(weights(near), weights(plain), tolerance=0.03)
    assert near.gathered.keys() == (weights(near).keys() if rank == 0 else set())  # on the first rank only

    ours, by_hand = made(Manual), made(Manual)
    fit(ours, PenstockStrategy(options=RELEASED), **TWO)
    fit(by_hand, "ddp", **TWO)
    torch.testing.assert_close(ours.losses, by_hand.losses, rtol=1e-6, atol=1e-6)
    assert_same_weights(weights(ours), weights(by_hand))

    chosen = PenstockStrategy(placement=penstock.Placement(params="cpu"), options=RELEASED)
    (found,) = trainer(chosen, **TWO).validate(made(), data(), verbose=False)
    (wanted,) = trainer("ddp", **TWO).validate(made(), data(), verbose=False)
    assert found == pytest.approx(wanted, rel=1e-6)

    with pytest.raises(LookupError, match="mine"):  # and waits for no other rank
        fit(made(Breaks), PenstockStrategy(options=RELEASED), **TWO)


def test_fits_evaluations_and_exceptions_are_those_of_ddp() -> None:
    run_two(beside_ddp)


def saves(rank: int, folder: Path) -> None:
    keeper = ModelCheckpoint(dirpath=folder, save_last=True, monitor="val", save_top_k=1)
    settings: dict[str, Any] = {"callbacks": [keeper], "enable_checkpointing": True, "max_epochs": 1, **TWO}
    run = trainer(PenstockStrategy(options=RELEASED), **settings)
    run.fit(made(), data(), data())
    run.save_checkpoint(folder / "after.ckpt", weights_only=True)


def goes_on(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    module = Net()
    placement = penstock.Placement(params=SPLIT, optimizer="cpu")
    chosen = PenstockStrategy(placement=placement, stage=2, options=RELEASED)
    fit(module, chosen, ckpt_path=folder / "last.ckpt", max_epochs=2, use_distributed_sampler=False, **TWO)
    return weights(module)


def test_checkpoints_of_two_ranks_go_on_with_one_and_the_other_way(tmp_path: Path) -> None:
    run_two(saves, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    read = Net.load_from_checkpoint(tmp_path / "after.ckpt")
    assert not any(value.isnan().any() for value in read.state_dict().values())
    keeper = ModelCheckpoint(tmp_path / "one", save_last=True)
    alone: dict[str, Any] = {"use_distributed_sampler": False}
    fit(
        made(), PenstockStrategy(options=RELEASED), max_epochs=1, callbacks=[keeper], enable_checkpointing=True, **alone
    )
    for folder in (tmp_path, tmp_path / "one"):
        # The same batches on one rank as on both: the runs are one.
        one = Net()
        fit(one, PenstockStrategy(options=RELEASED), ckpt_path=folder / "last.ckpt", max_epochs=2, **alone)
        for state in run_two(goes_on, folder):
            assert_same_weights(state, weights(one))
