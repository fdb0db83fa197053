"""The training loop: batches in, updates and reports out."""

import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import penstock
from penstock.cli.training.batches import train_batches
from penstock.cli.training.checkpoints import Checkpoints, Position
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.corpus import Tokens
from penstock.cli.training.display import Display
from penstock.cli.training.feeding import on_device
from penstock.cli.training.interruption import interruptible
from penstock.cli.training.metrics import Metrics
from penstock.cli.training.progress import Progress, bytes_by_tier
from penstock.cli.training.ranks import Ranks


def train_steps(
    model: nn.Module,
    optimizer: penstock.Optimizer,
    checkpoints: Checkpoints,
    start: Position,
    tokens: Tokens,
    config: TrainConfig,
    ranks: Ranks,
    display: Display,
    metrics: Metrics,
) -> Position:
    """Go on from `start` to `config.steps` steps. Every rank calls this; each reads its own sequences.

    1. Micro-batches: forward and backward, gradients added up.
    2. Update, then the next learning rate.
    3. Every `config.log_every` steps and after the last: report.
    4. Every `config.save_every` steps and after the last: save. Asked to end: save, and end.

    Returns:
        Where it ended: before the last step if it was asked to.
    """
    position = start
    scheduler = checkpoints.schedule(start)
    read = train_batches(
        tokens,
        seq_length=config.seq_length,
        batch_size=config.batch_size,
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        start=start.sequences,
    )
    window = _Window(config, ranks)
    per_step = config.batch_size * config.accumulation * ranks.world_size
    with closing(on_device(read, ranks.device)) as batches, interruptible(ranks) as interruption:
        for step in range(start.step + 1, config.steps + 1):
            # 1.
            loss = _accumulate(model, optimizer, batches, config, ranks)
            # 2.
            lr = float(scheduler.get_last_lr()[0])
            outcome = optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            window.add(loss, skipped=outcome.skipped)
            position = Position(step, position.sequences + per_step)
            # 3.
            if step % config.log_every == 0 or step == config.steps:
                progress = window.close(step, outcome.grad_norm, lr, bytes_by_tier(optimizer.locations()))
                display.show(progress)
                metrics.step(progress)
            # 4.
            asked = interruption.is_asked() and step < config.steps
            if asked or (config.save_every and (step % config.save_every == 0 or step == config.steps)):
                checkpoints.save(position, blocking=asked)
            if asked:
                break
    checkpoints.finish()
    return position


def _accumulate(
    model: nn.Module, optimizer: penstock.Optimizer, batches: Iterator[Tensor], config: TrainConfig, ranks: Ranks
) -> Tensor:
    """Add up the gradients of a step's micro-batches. Returns this rank's mean loss, on the device."""
    total = torch.zeros((), device=ranks.device)
    for micro_batch in range(1, config.accumulation + 1):
        ids = next(batches)
        with nullcontext() if micro_batch == config.accumulation else optimizer.no_sync():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / config.accumulation
            optimizer.backward(loss)
        total += loss.detach()
    return total


@dataclass
class _Window:
    """The steps since the last report. The loss stays on the device until it is reported, so no step waits for it."""

    config: TrainConfig
    ranks: Ranks
    began: float = field(default_factory=time.perf_counter)
    window_began: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)
    skipped_count: int = 0

    def add(self, loss: Tensor, *, skipped: bool) -> None:
        """Count a step."""
        self.losses.append(loss)
        self.skipped_count += skipped

    def close(self, step: int, grad_norm: float, lr: float, sizes: dict[str, int]) -> Progress:
        """Sum the steps up over all ranks, and begin the next window; collective."""
        config, world_size = self.config, self.ranks.world_size
        mean_loss = self.ranks.sum(torch.stack(self.losses).mean()).item() / world_size
        token_count = len(self.losses) * config.batch_size * config.accumulation * config.seq_length * world_size
        now = time.perf_counter()
        progress = Progress(
            step=step,
            steps=config.steps,
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_second=token_count / (now - self.window_began),
            seconds=now - self.began,
            skipped_count=self.skipped_count,
            bytes_by_tier=sizes,
        )
        self.window_began, self.losses = now, []
        return progress
