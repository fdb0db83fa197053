"""The model of a run, as files that `from_pretrained` reads."""

import shutil
from pathlib import Path

from torch import nn

import penstock
from penstock.cli.training.request import Request
from penstock.integrations.huggingface import save_pretrained


def save_model(model: nn.Module, optimizer: penstock.Optimizer, request: Request) -> None:
    """Save model and tokenizer; of a model with adapters what they make of it, and they alone beside it.

    Every rank calls it.

    Raises:
        CheckpointError: a file cannot be written.
    """
    out, is_first_rank = request.config.out, request.ranks.is_first
    if request.lora is None:
        save_pretrained(model, optimizer, out, is_first_rank=is_first_rank)
    else:
        _save_merged(optimizer, out, request)
    if is_first_rank:
        request.tokenizer.save(out)


def _save_merged(optimizer: penstock.Optimizer, out: Path, request: Request) -> None:
    """Export a checkpoint with its adapters merged, and move its files into a folder that has other ones."""
    saved, made = out / ".checkpoint", out / ".merged"
    if request.ranks.is_first:
        shutil.rmtree(made, ignore_errors=True)
    optimizer.save(saved)
    penstock.export(saved, made, dtype=request.precision, merge_adapters=True)
    if request.ranks.is_first:
        for old in out.glob("model*.safetensors*"):
            old.unlink()
        for file in [file for file in made.rglob("*") if file.is_file()]:
            (out / file.relative_to(made)).parent.mkdir(exist_ok=True)
            file.replace(out / file.relative_to(made))
        shutil.rmtree(saved)
        shutil.rmtree(made)
