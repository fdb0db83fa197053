"""`validate`, `test` and `predict` without an optimizer: as plain Lightning's, with parameters on any tier."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import penstock
from penstock.integrations.lightning import PenstockStrategy
from tests.integrations.lightning_cases import RELEASED, Net, data, fit, made, trainer, weights
from tests.lib.memory import disks


def strategy(params: str = "cpu", **arguments: Any) -> PenstockStrategy:
    placement = penstock.Placement(params=params, nvme_path=str(disks()[0]) if params == "nvme" else None)
    return PenstockStrategy(placement=placement, options=RELEASED, **arguments)


TRAINED = {"max_grad_norm": 1.0, "overlap": "forward", "master": "fp32"}  # which are no hindrance


@pytest.mark.parametrize("params", ["device", "nvme"])
def test_validate_test_and_predict(params: str) -> None:
    ours, plain = made(), made()
    run, expected = trainer(strategy(params, **TRAINED)), trainer("auto")
    for verb in ("validate", "test"):
        found, wanted = (getattr(by, verb)(of, data(), verbose=False) for by, of in ((run, ours), (expected, plain)))
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    torch.testing.assert_close(run.predict(ours, data()), expected.predict(plain, data()), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(weights(ours).values(), weights(plain).values(), strict=True))


@pytest.mark.parametrize("by", ["penstock", "auto"])
def test_checkpoints_are_evaluated_without_a_fit(tmp_path: Path, by: str) -> None:
    module, empty = made(), Net()
    keeper = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(module, by, max_epochs=1, callbacks=[keeper], enable_checkpointing=True)
    (found,) = trainer(strategy()).test(empty, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    (wanted,) = trainer("auto").test(module, data(), verbose=False)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert int(empty.count) == 8
