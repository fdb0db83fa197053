"""Two ranks: fits, manual loops, evaluation and checkpoints beside DDP, and how processes are started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import penstock
from penstock.integrations.lightning import PenstockStrategy
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
from tests.integrations.test_lightning import SPLIT, placements
from tests.integrations.test_lightning_manual import Manual
from tests.support import RANK_TIMEOUT, run_ranks

TWO: dict[str, Any] = {"devices": 2}


def run_two(work: Any, *args: Any) -> list[Any]:
    return run_ranks(work, 2, *args, timeout=3 * RANK_TIMEOUT, fresh=True)


def fits(rank: int) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, **TWO}
    plain = made()
    expected = fit(plain, "ddp", **settings)
    for stage, name in ((3, "device"), (1, "cpu"), (3, "split"), (3, "nvme"), (0, "device"), (2, "cpu")):
        ours = made() if rank == 0 else Net(lr=1e-2)  # the first rank's values are everybody's
        placement = penstock.Placement(**placements()[name])
        seen = fit(ours, PenstockStrategy(stage=stage, placement=placement, options=RELEASED), **settings)
        assert_same_run(seen, expected)
        assert_same_weights(weights(ours), weights(plain))


def test_fits_are_those_of_ddp() -> None:
    run_two(fits)


def manual_loops(rank: int) -> None:
    ours, plain = made(Manual), made(Manual)
    fit(ours, PenstockStrategy(options=RELEASED), **TWO)
    fit(plain, "ddp", **TWO)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-6, atol=1e-6)
    assert_same_weights(weights(ours), weights(plain))


def test_manual_loops_are_those_of_ddp() -> None:
    run_two(manual_loops)


def bf16(rank: int) -> None:
    ours, plain = made(), made()
    seen = fit(ours, PenstockStrategy(options=RELEASED), precision="bf16-mixed", **TWO)
    assert_same_run(seen, fit(plain, "ddp", **TWO), tolerance=0.05)
    assert_same_weights(weights(ours), weights(plain), tolerance=0.03)


def test_bf16_is_near_to_fp32() -> None:
    run_two(bf16)


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
    # The same batches on one rank as on both: the runs are one.
    one = Net()
    chosen = PenstockStrategy(options=RELEASED)
    fit(one, chosen, ckpt_path=tmp_path / "last.ckpt", max_epochs=2, use_distributed_sampler=False)
    for state in run_two(goes_on, tmp_path):
        assert_same_weights(state, weights(one))
    read = Net.load_from_checkpoint(tmp_path / "after.ckpt")
    assert not any(value.isnan().any() for value in read.state_dict().values())

    keeper = ModelCheckpoint(tmp_path / "one", save_last=True)
    settings: dict[str, Any] = {"use_distributed_sampler": False, "callbacks": [keeper], "enable_checkpointing": True}
    fit(made(), PenstockStrategy(options=RELEASED), max_epochs=1, **settings)
    one = Net()
    chosen = PenstockStrategy(options=RELEASED)
    fit(one, chosen, ckpt_path=tmp_path / "one" / "last.ckpt", max_epochs=2, use_distributed_sampler=False)
    for state in run_two(goes_on, tmp_path / "one"):
        assert_same_weights(state, weights(one))


def evaluates(rank: int) -> None:
    for verb in ("validate", "test"):
        ours, plain = made(), made()
        chosen = PenstockStrategy(placement=penstock.Placement(params="cpu"), options=RELEASED)
        (found,) = getattr(trainer(chosen, **TWO), verb)(ours, data(), verbose=False)
        (wanted,) = getattr(trainer("ddp", **TWO), verb)(plain, data(), verbose=False)
        assert found == pytest.approx(wanted, rel=1e-6)


def test_evaluation_is_that_of_ddp() -> None:
    run_two(evaluates)


def gathers(rank: int) -> int:
    module = made()
    found: list[dict[str, torch.Tensor]] = []

    class Asks(Net):
        def on_train_end(self) -> None:
            found.append(self.trainer.strategy.lightning_module_state_dict())

    module = made(Asks)
    fit(module, PenstockStrategy(options=RELEASED), max_epochs=1, **TWO)
    if rank == 0:
        assert_same_weights(found[0], weights(module), tolerance=0.0)
    return len(found[0])


def test_weights_are_gathered_on_the_first_rank_only() -> None:
    counts = run_two(gathers)
    assert counts[0] > 0
    assert counts[1] == 0


SCRIPT = """
import lightning, torch
import penstock.integrations.lightning
from tests.integrations.lightning_cases import data, made, trainer
module = made()
run = trainer("penstock", devices=2, max_epochs=1)
run.fit(module, data())
assert run.world_size == 2 and len(module.losses) == 4
with open(f"weight{run.global_rank}", "w") as file:  # both at once: a line of one may stand in a line of the other
    file.write(str(float(module.first.weight.double().sum())))
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_processes_are_started_by_lightning_or_by_torchrun(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if launcher == "torchrun" else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, *ranks, str(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert (tmp_path / "weight0").read_text() == (tmp_path / "weight1").read_text()


def fails(rank: int) -> str:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise LookupError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(LookupError, match="mine"):
        fit(made(Breaks), PenstockStrategy(options=RELEASED), **TWO)
    return "said"


def test_an_exception_does_not_wait_for_other_ranks() -> None:
    assert run_two(fails) == ["said", "said"]
