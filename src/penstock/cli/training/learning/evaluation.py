"""How good the model is on text that it was not trained on."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from penstock.cli.ranks import Ranks
from penstock.cli.training.data.feed import Feed
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.best import Best
from penstock.cli.training.learning.loss import Loss
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.sampling import Sampler


@dataclass(frozen=True)
class Measured:
    """What an evaluation has found.

    Attributes:
        loss: in nats per token, the same number on every rank.
        is_best: whether it is the lowest so far; `None` where it is no part of the search for that.
    """

    loss: float
    is_best: bool | None


class Evaluations:
    """Measures the held-out loss, and reports it. Every rank makes every call.

    Arguments:
        model: what is trained.
        loss: of that model.
        feed: where held-out batches come from.
        ranks: the place of this process.
        reports: who is told.
        interruption: what may break an evaluation off.
        token_name: what a token is, in the singular.
        sampler: what writes samples after each; `None` for none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        feed: Feed,
        ranks: Ranks,
        reports: Reports,
        interruption: Interruption,
        *,
        token_name: str,
        sampler: Sampler | None = None,
    ) -> None:
        self._model = model
        self._loss = loss
        self._feed = feed
        self._ranks = ranks
        self._reports = reports
        self._interruption = interruption
        self._token_name = token_name
        self._sampler = sampler

    def measure(self, step: int, best: Best | None = None) -> Measured | None:
        """Measure and report the held-out loss after some steps, in nats per token.

        Arguments:
            step: steps that were made.
            best: counts the loss; `None` where this evaluation is no part of the search for the lowest one.

        Returns:
            What was found; `None` where a rank was asked to end meanwhile.
        """
        began = time.perf_counter()
        self._model.eval()
        try:
            loss = self._mean()
        finally:
            self._model.train()
        if loss is None:
            return None
        seconds = time.perf_counter() - began
        is_best = None if best is None else best.count(step, loss)
        self._reports.evaluation(step, loss, seconds, token_name=self._token_name, is_best=is_best)
        if self._sampler is not None:
            self._sampler.write(step)
        return Measured(loss, is_best)

    def _mean(self) -> float | None:
        """Take the mean over all held-out tokens: a long sequence weighs more than a short one."""
        ranks = self._ranks
        # Where one rank fails all fail: the sum of many tokens' losses needs more digits than fp32 has.
        total = torch.zeros((), device=ranks.device, dtype=torch.float64)
        label_count = 0
        with torch.no_grad():
            for batch, counts in self._feed.held_out():
                # Ranks break off together: a forward may be a collective.
                if ranks.any(self._interruption.asked):
                    return None
                with self._loss.around():
                    loss = self._loss(batch, batch.label_count)
                if counts and batch.label_count:
                    total += loss.double() * batch.label_count
                    label_count += batch.label_count if ranks.counts_rows else 0
        # Until here nothing has waited for the device. A number is filled in there: to copy it the host would wait too.
        sums = ranks.sum(torch.stack([total, torch.full_like(total, label_count)]))
        loss_sum, count = ranks.from_first(sums).tolist()
        return float(loss_sum / count) if count else float("nan")
