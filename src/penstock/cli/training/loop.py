"""The training loop: batches in, updates and reports out, until the last step or until it is asked to end."""

import signal
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Self

import torch
from torch import Tensor, nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.checkpoints import Checkpoints, Position
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import Tokens, on_device, train_batches
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.memory import bytes_by_tier
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.reports import Reports

#: The exit status of a run that was asked to end and can be resumed: `EX_TEMPFAIL` of sysexits(3), "try again".
EXIT_INTERRUPTED = 75
#: What asks a run to end: a scheduler of preemptible machines, or a launcher.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def train_steps(
    model: nn.Module,
    optimizer: penstock.Optimizer,
    checkpoints: Checkpoints,
    start: Position,
    tokens: Tokens,
    config: TrainConfig,
    course: Course,
    ranks: Ranks,
    reports: Reports,
) -> Position:
    """Go on from `start` to `course.steps` steps. Every rank calls this; each reads its own sequences.

    1. Micro-batches: forward and backward, gradients added up.
    2. Update, then the next learning rate.
    3. Every `config.log_every` steps and after the last: report.
    4. Every `config.save_every` steps and after the last: save. Asked to end: save, and end.

    Returns:
        Where it ended: before the last step if it was asked to.
    """
    position = start
    scheduler = checkpoints.schedule(start)
    read = train_batches(tokens, course, ranks, seed=config.seed, start=start.sequences)
    window = _Window(course, ranks)
    gauges = Gauges(model, optimizer, config, course, ranks, begin=start.step)
    with closing(on_device(read, ranks.device)) as batches, Interruption(ranks) as interruption, gauges:
        for step in range(start.step + 1, course.steps + 1):
            gauges.begin(step)
            # 1.
            loss = _accumulate(model, optimizer, batches, course.accumulation, ranks)
            # 2. The rate is read before the scheduler changes it, so that the report has the one of this update.
            lr = float(scheduler.get_last_lr()[0])
            outcome = optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            window.add(loss, skipped=outcome.skipped)
            position = Position(step, position.sequences + course.per_step)
            # 3.
            if step % config.log_every == 0 or step == course.steps:
                sizes = bytes_by_tier(optimizer.locations())
                reports.step(gauges.read(window.close(step, outcome.grad_norm, lr, sizes)))
            # 4. Every rank asks in every step: the answer is a collective, and a signal may reach one rank alone.
            asked = interruption.is_asked() and step < course.steps
            if asked or (config.save_every and (step % config.save_every == 0 or step == course.steps)):
                checkpoints.save(position, blocking=asked)
            if asked:
                break
    # Without this the process could end while the last checkpoint is being written, and leave half of it.
    checkpoints.finish()
    return position


def _accumulate(
    model: nn.Module, optimizer: penstock.Optimizer, batches: Iterator[Tensor], accumulation: int, ranks: Ranks
) -> Tensor:
    """Add up the gradients of a step's micro-batches, and return this rank's mean loss, on the device."""
    total = torch.zeros((), device=ranks.device)
    for micro_batch in range(1, accumulation + 1):
        ids = next(batches)
        # Ranks exchange gradients once a step, with the last micro-batch.
        with nullcontext() if micro_batch == accumulation else optimizer.no_sync():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / accumulation
            optimizer.backward(loss)
        total += loss.detach()
    return total


@dataclass
class _Window:
    """The steps since the last report. The loss stays on the device until it is reported, so no step waits for it."""

    course: Course
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
        """Sum the steps up over all ranks, and begin the next window. Every rank calls it."""
        course, world_size = self.course, self.ranks.world_size
        mean_loss = self.ranks.sum(torch.stack(self.losses).mean()).item() / world_size
        # After the loss was read, which waits for the device: else the time of the last steps would be missing.
        now = time.perf_counter()
        token_count = len(self.losses) * course.per_step * course.seq_length
        progress = Progress(
            step=step,
            steps=course.steps,
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


class Interruption:
    """Takes note of the signals that ask to end, as a context in which they do not end the process."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._asked = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def is_asked(self) -> bool:
        """Tell whether any rank was asked to end. The same answer on every rank; every rank calls it."""
        return bool(self._ranks.sum(torch.tensor(float(self._asked))) > 0)
