"""The code of docs/lightning.md runs, in the order of the page; its recipes train as plain torch does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from tests.integrations.lightning_cases import PAGE, assert_same_weights, weights

BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        exec(block, names)
    assert isinstance(names["strategy"], names["PenstockStrategy"])
    for folder in ("step-8", "adversaries/maker", "adversaries/judge"):
        assert (tmp_path / folder / "checkpoint.json").is_file()


class Plain:
    """A torch optimizer with the methods of Penstock's that the recipes call."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def save(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...


def test_the_recipes_train_as_plain_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = []
    for is_plain in (False, True):
        with monkeypatch.context() as patched:
            if is_plain:
                patched.setattr(penstock, "prepare", lambda model, optimizer, **_: Plain(model, optimizer))
            names: dict[str, Any] = {"torch": torch, "penstock": penstock}
            torch.manual_seed(0)
            for block in BLOCKS[3:]:
                exec(block.replace('precision="bf16"', 'precision="fp32"'), names)
        trained.append([weights(names[name]) for name in ("model", "maker", "judge")])
    for ours, plain in zip(*trained, strict=True):
        assert_same_weights(ours, plain)
