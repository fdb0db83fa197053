"""What is read beside the loss while steps are made: speed, memory, waits."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.precision import resolve_precision
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.memory import host_peak_bytes, take_device_peak
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.waits import TRACE_NAME, Watch
from penstock.integrations.speed import Speed, device_name, flops_per_token, peak_flops


class Gauges(AbstractContextManager["Gauges"]):
    """Reads how fast the steps are, what memory they take and what they wait for. A context around the steps.

    Every rank has one, and makes every call: some are collective.

    Arguments:
        model: what is trained.
        optimizer: what `penstock.prepare` returned for it.
        config: the settings.
        course: what a step is, and how many there are.
        ranks: the place of this process.
        begin: steps that were made before the first one here.

    Example:
        >>> with Gauges(model, optimizer, config, course, ranks) as gauges:  # doctest: +SKIP
        ...     for step in range(1, course.steps + 1):
        ...         gauges.begin(step)
        ...         make(step)
        ...         if step % config.log_every == 0 or step == course.steps:
        ...             reports.step(gauges.read(progress))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: penstock.Optimizer,
        config: TrainConfig,
        course: Course,
        ranks: Ranks,
        *,
        begin: int = 0,
    ) -> None:
        self._course, self._ranks, self._log_every = course, ranks, config.log_every
        self._speed = speed_of(model, config, course, ranks)
        self._watch = Watch(optimizer, config.out / TRACE_NAME, ranks, begin=begin)

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    def begin(self, step: int) -> None:
        """Take note that a step begins."""
        left = self._course.steps - step
        self._watch.begin(step, is_candidate=left == 1 or (left > 1 and (step + 1) % self._log_every == 0))

    def read(self, progress: Progress) -> Progress:
        """Complete what the loop knows of a step by what was read; called when the device has finished the step."""
        mfu = None
        if self._speed is not None:
            mfu = self._speed.mfu(progress.tokens_per_second, world_size=self._ranks.world_size)
        waits = self._watch.end(progress.step)
        return replace(
            progress,
            mfu=mfu,
            device_peak_bytes=take_device_peak(self._ranks.device),
            host_peak_bytes=host_peak_bytes(),
            waits=waits,
            spread=self._watch.take_spread(),
        )


def speed_of(model: nn.Module, config: TrainConfig, course: Course, ranks: Ranks) -> Speed | None:
    """Work out what a token costs and what the device can do; `None` where nobody knows that of the device."""
    precision = resolve_precision(config.precision, ranks.device)
    peak = config.peak_flops or peak_flops(device_name(ranks.device), precision)
    return None if peak is None else Speed(flops_per_token(model, seq_length=course.seq_length), peak)
