"""What the code of a page finds there already: the names that it uses and does not make, small."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

import penstock
from tests.lib.models import llama

Names = dict[str, Any]


def _prepared() -> tuple[torch.nn.Module, penstock.Optimizer]:
    """A small model that has made a step, so that every kind of state is there."""
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(2)])
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    optimizer.backward(model(torch.ones(2, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@contextlib.contextmanager
def nothing() -> Generator[Names]:
    """A page that makes all that it uses."""
    yield {}


@contextlib.contextmanager
def in_training() -> Generator[Names]:
    """A model and its optimizer between two steps, a schedule and two batches."""
    model, optimizer = _prepared()

    def train_one_step(batch: torch.Tensor) -> None:
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    yield {
        "penstock": penstock,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        "batches": [torch.randn(2, 16) for _ in range(2)],
        "train_one_step": train_one_step,
    }
    optimizer.close()


@contextlib.contextmanager
def moving() -> Generator[Names]:
    """The same with a model that answers prompts, and a critic that trains meanwhile."""
    with in_training() as names:
        model = names["model"]
        model.generate = lambda **prompts: model(prompts["input_ids"])
        yield {**names, "prompts": {"input_ids": torch.ones(1, 16)}, "critic": object(), "train": lambda critic: None}


@contextlib.contextmanager
def from_deepspeed() -> Generator[Names]:
    """A checkpoint of DeepSpeed's, imported as the page does it, and a model that it is of."""
    from penstock.ext.interop.deepspeed import import_checkpoint
    from tests.optional.deepspeed_files import Model, groups

    import_checkpoint(Path(__file__).parents[1] / "data" / "deepspeed" / "z2-bf16-w2", "checkpoints/from-deepspeed")
    model = Model()
    names: Names = {"penstock": penstock, "torch": torch, "model": model, "groups": groups(model)}
    yield names
    assert names["extra"]["global_steps"]
    names["optimizer"].close()


@contextlib.contextmanager
def saved_language_model() -> Generator[Names]:
    """A language model of transformers in training, and a folder to save it into."""
    model = llama()
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    yield {"model": model, "optimizer": optimizer, "out": Path("out")}
    optimizer.close()


@contextlib.contextmanager
def in_a_trainer() -> Generator[Names]:
    """A model of transformers, rows, and the arguments of a Trainer for two steps."""
    from transformers import TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (8, 4))]
    args = TrainingArguments("out", max_steps=2, report_to="none", use_cpu=True)
    yield {"model": llama(), "args": args, "rows": rows}


@contextlib.contextmanager
def with_matrices() -> Generator[Names]:
    """A model that is not prepared."""
    yield {"torch": torch, "penstock": penstock, "model": torch.nn.Sequential(torch.nn.Linear(8, 8))}


#: Pages whose code uses what it does not make.
GIVEN: dict[str, Callable[[], contextlib.AbstractContextManager[Names]]] = {
    "docs/checkpoints.md": in_training,
    "docs/export.md": from_deepspeed,
    "docs/moves.md": moving,
    "docs/rules.md": with_matrices,
    "docs/trace.md": in_training,
    "docs/train.md": saved_language_model,
}
