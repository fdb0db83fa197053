"""The loop of `penstock train` beside transformers' Trainer: padded rows, uneven labels, accumulation, ranks."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer

from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.sequences.batches import Batch
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.checkpoints import Checkpoints, Position
from penstock.cli.training.learning.loop import LoopStepper, Training
from penstock.cli.training.learning.loss import Loss
from penstock.cli.training.learning.model import Built
from penstock.cli.training.learning.optimizer import preparation
from penstock.cli.training.recipe import Course, recipe_for
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.reports import Reports
from penstock.integrations.chunked import chunk_loss
from tests.integrations.trainers import LENGTH, arguments, assert_weights, history, llama, rows
from tests.support import run_ranks

STEPS, PER_RANK, ACCUMULATION = 6, 2, 2
CHANGES: dict[str, Any] = {
    "gradient_accumulation_steps": ACCUMULATION,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "adam_beta2": 0.95,
}


class InOrder(Trainer):
    """Trainer on its rows as they come, so that both loops see the same ones in a step."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class RowsFeed:
    """The rows in order: each rank's micro-batches as accelerate deals them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rows = rows()

    def training(self, start: int) -> Generator[tuple[Batch, int], None, None]:
        per_step = PER_RANK * ACCUMULATION * self._ranks.world_size
        first = start
        while True:
            step = [self._rows[(first + number) % len(self._rows)] for number in range(per_step)]
            labels_of_step = sum(labels_in(row["labels"][None]) for row in step)
            for micro_batch in range(ACCUMULATION):
                place = (micro_batch * self._ranks.world_size + self._ranks.rank) * PER_RANK
                yield batch_of(step[place : place + PER_RANK]), labels_of_step
            first += per_step

    def held_out(self) -> Iterator[tuple[Batch, bool]]:
        yield from ()

    def identity(self) -> dict[str, Any]:
        return {}


def labels_in(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


def batch_of(some: list[dict[str, Tensor]]) -> Batch:
    ids, mask, labels = (torch.stack([row[k] for row in some]) for k in ("input_ids", "attention_mask", "labels"))
    return Batch(ids, labels, None, mask, label_count=labels_in(labels), token_count=int(mask.sum()))


class Noted(Reports):
    """Keeps what it is told."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config, is_first_rank=False)
        self.told: list[Progress] = []

    def step(self, progress: Progress) -> None:
        self.told.append(progress)


def train_here(out: Path, *, kind: str = "plain") -> tuple[list[Progress], dict[str, Tensor]]:
    """Train by the command's own loop, and return what it reported and the weights it came to."""
    ranks = Ranks.from_environment()
    config = TrainConfig(
        out=out, steps=STEPS, batch_size=PER_RANK, accumulation=ACCUMULATION, lr=1e-2, warmup=2, log_every=1,
        max_grad_norm=0.5, seq_length=LENGTH, precision="fp32", stage=3, eval_sequences=0,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    recipe = recipe_for(config, positions=32, world_size=ranks.world_size)
    course: Course = recipe.over(config, 24)
    model = llama()
    if kind == "chunked":
        chunk_loss(model)
    if kind == "by logits":
        model.accepts_loss_kwargs = False
    loss = Loss(model)
    optimizer = preparation(Built(model, None), config, course, "fp32").prepare()
    feed, reports = RowsFeed(ranks), Noted(config)
    checkpoints = Checkpoints(config, course, optimizer, feed.identity())
    stepper = LoopStepper(loss, optimizer, course, ranks)
    gauges = Gauges(model, optimizer, config, course, ranks)
    Training(stepper, feed, checkpoints, None, config, reports, gauges, Interruption()).run(Position())
    weights = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close(keep_params=False)
    return reports.told, weights


def train_there(out: Path) -> Trainer:
    changes = CHANGES | {"max_steps": STEPS}
    trainer = InOrder(model=llama(), args=arguments(out, **changes), train_dataset=rows())
    trainer.train()
    return trainer


def assert_the_same(told: list[Progress], weights: dict[str, Tensor], trainer: Trainer) -> None:
    wanted = torch.tensor(history(trainer), dtype=torch.float64)
    assert len(wanted) == STEPS
    got = torch.tensor([[each.loss, each.grad_norm, each.lr] for each in told], dtype=torch.float64)
    # Trainer writes a loss with four digits behind its point at least, a norm as it is.
    torch.testing.assert_close(got[:, 1:], wanted[:, 1:], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got[:, 0], wanted[:, 0], rtol=1e-6, atol=1e-6)
    model: Any = trainer.model
    assert_weights(weights, {n: p.detach() for n, p in model.named_parameters()}, relative=1e-6)


@pytest.mark.parametrize("kind", ["plain", "chunked", "by logits"])
def test_one_rank(tmp_path: Path, kind: str) -> None:
    told, weights = train_here(tmp_path / "here", kind=kind)
    assert_the_same(told, weights, train_there(tmp_path / "there"))


def both(rank: int, out: Path) -> None:
    told, weights = train_here(out / "here")
    assert_the_same(told, weights, train_there(out / "there"))


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(both, 2, tmp_path)
