"""A model without an optimizer beside one that is trained: sharded and placed for inference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from penstock.integrations.accelerate import PenstockAccelerator
from tests.integrations.accelerate_loops import PLACEMENTS, bert, fresh


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh()


def ours(placement: str = "cpu") -> PenstockAccelerator:
    return PenstockAccelerator(penstock={"placement": PLACEMENTS[placement]})


def sentences() -> dict[str, Any]:
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": torch.tensor([0, 1])}


def test_a_reference_model_beside_a_trained_one(tmp_path: Path) -> None:
    def run(accelerator: Accelerator) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(2)
        policy, reference = bert().eval(), bert().eval()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        policy, reference, optimizer = accelerator.prepare(policy, reference, optimizer)
        losses = []
        for _ in range(3):
            with torch.no_grad():
                target = reference(**sentences()).logits
            loss = nn.functional.mse_loss(policy(**sentences()).logits, target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(policy.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(str(tmp_path / type(accelerator).__name__))
        accelerator.load_state(str(tmp_path / type(accelerator).__name__))
        return losses, accelerator.get_state_dict(reference)["classifier.weight"].clone()

    theirs = run(Accelerator(cpu=True))
    fresh()
    accelerator = ours()
    mine = run(accelerator)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    accelerator.free_memory()
