"""What a checkpoint that was imported must hold: what plain torch computes in the same training."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.ext.interop.deepspeed import _NAMES, import_checkpoint
from tests.optional.deepspeed_files import STEPS, Model, batch, groups


class Ignored:
    """Stands for an object of DeepSpeed's."""


class Harmful:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def refused(importer: Callable[..., None], folder: Path, match: str) -> None:
    """Assert that a checkpoint is not imported, and nothing is made of it."""
    out = folder.parent / "out"
    with pytest.raises(penstock.CheckpointError, match=match):
        importer(folder, out)
    assert not out.exists() or not any(out.iterdir())


def load(file: Path) -> Any:
    """The content of a file of DeepSpeed, by torch's own reader."""
    stand_ins = [(int if name.endswith("Enum") else Ignored, name) for name in _NAMES]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, weights_only=True)


def plain(world_size: int, steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training without DeepSpeed, in fp32: the mean over the ranks' batches."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95))
    for step in range(steps):
        for rank in range(world_size):
            (model(batch(step, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def prepared(precision: str = "fp32") -> tuple[nn.Module, penstock.Optimizer]:
    """The same model with other values, and an optimizer with other options."""
    torch.manual_seed(1)
    model = Model()
    model.seen.zero_()
    optimizer = penstock.prepare(model, torch.optim.AdamW(groups(model), lr=1.0), precision=precision)
    return model, optimizer


def assert_near(found: Tensor, expected: Tensor, near: float, what: str) -> None:
    """Element by element, within a fraction of the largest: bf16 gradients change the sign of small ones."""
    assert found.shape == expected.shape
    torch.testing.assert_close(
        found, expected, rtol=0, atol=near * float(expected.abs().max()), msg=lambda text: f"{what}: {text}"
    )


def check(
    folder: Path,
    out: Path,
    *,
    world_size: int = 2,
    near: float = 1e-5,
    importer: Callable[..., None] = import_checkpoint,
) -> None:
    """Import, load, compare every value, and train on."""
    importer(folder, out)
    model, optimizer = prepared()
    extra = optimizer.load(out)
    assert extra["global_steps"] == STEPS
    reference, adamw = plain(world_size)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_near(optimizer.full_param(ours), theirs.detach(), near, name)
        for state in ("exp_avg", "exp_avg_sq") if theirs.requires_grad else ():
            assert_near(optimizer.full_state(ours, state), adamw.state[theirs][state], near, f"{state} of {name}")
    assert torch.equal(model.seen, reference.seen)
    for ours_group, theirs_group in zip(optimizer.param_groups, adamw.param_groups, strict=True):
        for option in ("lr", "betas", "eps", "weight_decay"):
            assert ours_group[option] == theirs_group[option], option

    on, _ = plain(world_size, STEPS + 1)  # one step more: counts and options are theirs
    for rank in range(world_size):
        optimizer.backward(model(batch(STEPS, rank)) / world_size)
    optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), on.parameters(), strict=True):
        assert_near(optimizer.full_param(ours), theirs.detach(), near, f"{name}, one step later")
    optimizer.close()


def masters(folder: Path, out: Path) -> dict[str, Tensor]:
    """The fp32 values of every parameter, imported."""
    import_checkpoint(folder, out)
    model, optimizer = prepared()
    optimizer.load(out)
    values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return values
