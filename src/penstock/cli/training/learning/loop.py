"""The training loop: batches in, updates and reports out, until the last step or until it is to end."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.feed import Feed
from penstock.cli.training.data.sequences.batches import Batch
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.checkpoints import Checkpoints, Position
from penstock.cli.training.learning.evaluation import Evaluations
from penstock.cli.training.learning.loss import Loss
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.memory import bytes_by_tier
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.reports import Reports


class Why(Enum):
    """Why a run ended."""

    DONE = "it has made its steps"
    ASKED = "it was asked to, and has saved"
    EARLY = "its evaluations no longer got better"


@dataclass(frozen=True)
class Ending:
    """How training ended.

    Attributes:
        why: the reason.
        position: where.
        loss_before: the first held-out loss; `None` where none was measured.
        loss_after: the last one.
    """

    why: Why
    position: Position
    loss_before: float | None
    loss_after: float | None


class LoopStepper:
    """Makes the steps of a run. Every rank makes every call, with its own batches.

    Arguments:
        loss: of the prepared model.
        optimizer: of that model.
        course: what a step is.
        ranks: the place of this process.
    """

    def __init__(self, loss: Loss, optimizer: penstock.Optimizer, course: Course, ranks: Ranks) -> None:
        self.optimizer = optimizer
        self.course = course
        self.ranks = ranks
        self._loss = loss

    def make(self, batches: Iterator[tuple[Batch, int]], window: "Window") -> penstock.StepResult:
        """Add up the gradients of a step's micro-batches, and update.

        The loss is the mean over all labels of the step. Every rank knows how many those are, without asking others.
        """
        total = torch.zeros((), device=self.ranks.device)
        token_count = label_count = 0
        for micro_batch in range(1, self.course.accumulation + 1):
            batch, label_count = next(batches)
            # Ranks exchange gradients once a step, with the last micro-batch.
            sync = nullcontext() if micro_batch == self.course.accumulation else self.optimizer.no_sync()
            with self._loss.around(), sync:
                loss = self._loss(batch, label_count)
                # A rank's part of the sum over all labels: gradients are summed over ranks (`Preparation`).
                self.optimizer.backward(loss)
            total += loss.detach()
            token_count += batch.token_count if self.ranks.counts_rows else 0
        outcome = self.optimizer.step()
        self.optimizer.zero_grad()
        window.add(total, label_count, token_count, skipped=outcome.skipped)
        return outcome


class Training:
    """A run from its first step to its last. Every rank makes every call.

    Arguments:
        stepper: makes the steps.
        feed: what is read.
        checkpoints: saves the run.
        evaluations: measures it; `None` measures nothing.
        config: the settings.
        reports: who is told.
        gauges: what is read beside the loss.
        interruption: what may ask it to end.
    """

    def __init__(
        self,
        stepper: LoopStepper,
        feed: Feed,
        checkpoints: Checkpoints,
        evaluations: Evaluations | None,
        config: TrainConfig,
        reports: Reports,
        gauges: Gauges,
        interruption: Interruption,
    ) -> None:
        self._gauges = gauges
        self._stepper = stepper
        self._feed = feed
        self._checkpoints = checkpoints
        self._evaluations = evaluations
        self._config = config
        self._reports = reports
        self._interruption = interruption
        self._steps = stepper.course.steps

    def run(self, start: Position) -> Ending:
        """Go on from `start` to the last step.

        1. Measure the held-out loss.
        2. Steps: micro-batches, an update, the next learning rate.
        3. Every `config.log_every` steps and after the last: report.
        4. Every `config.eval_every` steps and after the last: measure the held-out loss, and keep the best.
        5. Every `config.save_every` steps and after the last: save. Asked to end: save, and end.
        """
        # 1.
        why, before = self._evaluate(start)
        position, after = start, before
        schedule = self._checkpoints.schedule(start)
        optimizer, course = self._stepper.optimizer, self._stepper.course
        window = Window(course, self._stepper.ranks, position.step)
        with closing(self._feed.training(start.sequences)) as batches, self._gauges:
            while why is None:
                self._gauges.begin(position.step + 1)
                # 2. The rate is read before the schedule changes it, so that the report has the one of this update.
                lr = float(schedule.get_last_lr()[0])
                outcome = self._stepper.make(batches, window)
                schedule.step()
                position = Position(position.step + 1, position.sequences + course.per_step)
                # 3.
                if self._is_due(position.step, self._config.log_every):
                    located = optimizer.locations()
                    progress = window.close(position.step, outcome.grad_norm, lr, bytes_by_tier(located))
                    self._reports.step(self._gauges.read(progress))
                    self._reports.placement(position.step, located)
                # 4.
                why = self._ending(position, measured=self._evaluations is None)
                if why is not Why.ASKED and self._is_due(position.step, self._config.eval_every):
                    with window.paused():
                        why, measured = self._evaluate(position)
                    after = after if measured is None else measured
                # 5.
                is_end = why in (Why.DONE, Why.EARLY)
                if self._config.save_every and (is_end or self._is_due(position.step, self._config.save_every)):
                    self._checkpoints.save(position, blocking=False)
        if why is Why.ASKED:
            self._checkpoints.save(position, blocking=True)
        elif why is Why.EARLY:
            count = self._checkpoints.best.since_count
            self._reports.note(f"stops early: the last {count} evaluations did not lower the held-out loss")
        # Without this the process could end while the last checkpoint is being written, and leave half of it.
        self._checkpoints.finish()
        return Ending(why, position, before, after)

    def _is_due(self, step: int, every: int) -> bool:
        """Tell whether something is done after a step that is done every so many, and after the last."""
        return step == self._steps or (every > 0 and step % every == 0)

    def _ending(self, position: Position, *, measured: bool) -> Why | None:
        """Say whether the run ends here, given that its model was measured or not. Every rank gets the same answer."""
        # Every rank asks in every step: the answer is a collective, and a signal may reach one rank alone.
        asked = self._stepper.ranks.any(self._interruption.asked)
        is_last = position.step >= self._steps
        # With nothing left but to save the model, that is what is saved.
        if asked and not (is_last and measured):
            return Why.ASKED
        if self._config.early_stop and self._checkpoints.best.since_count >= self._config.early_stop:
            return Why.EARLY
        return Why.DONE if is_last else None

    def _evaluate(self, position: Position) -> tuple[Why | None, float | None]:
        """Measure the held-out loss, keep what has the lowest, and say whether the run ends here.

        An evaluation that is broken off is made again when the run goes on. The one before the first step, and one that
        a resume alone has made, are no part of the search for the best: a run that was never interrupted has none.
        """
        loss = None
        if self._evaluations is not None:
            best = self._checkpoints.best
            counts = self._config.keeps_best and self._is_due(position.step, self._config.eval_every)
            counts = counts and position.step > best.counted_step
            measured = self._evaluations.measure(position.step, best if counts else None)
            if measured is None:
                return Why.ASKED, None
            loss = measured.loss
            if measured.is_best:
                self._checkpoints.save_best(position)
        return self._ending(position, measured=True), loss


@dataclass
class Window:
    """The steps since the last report. The loss stays on the device until it is reported, so no step waits for it.

    Arguments:
        course: what a step is, and how many there are.
        ranks: the place of this process.
        begin: steps that were made before this process began.
    """

    course: Course
    ranks: Ranks
    begin: int = 0
    began: float = field(default_factory=time.perf_counter)
    window_began: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)
    label_count: int = 0
    token_count: int = 0
    skipped_count: int = 0

    def add(self, loss: Tensor, label_count: int, token_count: int, *, skipped: bool) -> None:
        """Count a step: this rank's part of its loss, the labels of all ranks in it, and this rank's tokens."""
        self.losses.append(loss * label_count)
        self.label_count += label_count
        self.token_count += token_count
        self.skipped_count += skipped

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of something else out of the speed of training."""
        began = time.perf_counter()
        yield
        self.window_began += time.perf_counter() - began

    def close(self, step: int, grad_norm: float, lr: float, sizes: dict[str, int]) -> Progress:
        """Sum the steps up over all ranks, and begin the next window. Every rank calls it."""
        loss_sum = torch.stack(self.losses).double().sum()
        sums = self.ranks.sum(torch.stack([loss_sum, torch.full_like(loss_sum, self.token_count)]))
        loss, token_count = sums.tolist()
        # After the loss was read, which waits for the device: else the time of the last steps would be missing.
        now = time.perf_counter()
        progress = Progress(
            step=step,
            steps=self.course.steps,
            loss=loss / self.label_count if self.label_count else float("nan"),
            grad_norm=grad_norm,
            lr=lr,
            tokens_per_second=token_count / (now - self.window_began),
            seconds=now - self.began,
            skipped_count=self.skipped_count,
            bytes_by_tier=sizes,
            begin=self.begin,
            token_count=round(token_count),
        )
        self.window_began, self.losses, self.label_count, self.token_count = now, [], 0, 0
        return progress
