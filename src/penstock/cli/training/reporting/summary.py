"""What a run comes to: the numbers of all its reports in a small table."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from penstock.cli.training.reporting.formats import format_bytes, format_seconds, format_sizes
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.waits import Waits


@dataclass
class Summary:
    """Adds the reports of a run up. A run that goes on from a checkpoint counts what it has done itself.

    Attributes:
        losses: held-out losses in nats per token, by the step after which they were measured.
        last: the newest report.
        token_count: tokens of all ranks, without padding.
        training_seconds: what they took, without evaluations.
        state_peaks: the most bytes of training state, by tier.
        device_peak_bytes: the most of all reports; `None` where it is not known.
        host_peak_bytes: the same of the host.
        waits: what traced steps have waited for.
    """

    losses: dict[int, float] = field(default_factory=dict)
    last: Progress | None = None
    token_count: int = 0
    training_seconds: float = 0.0
    state_peaks: dict[str, int] = field(default_factory=dict)
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    waits: list[Waits] = field(default_factory=list)

    def add(self, progress: Progress) -> None:
        """Count a report."""
        self.token_count += progress.token_count
        if progress.tokens_per_second:
            self.training_seconds += progress.token_count / progress.tokens_per_second
        for tier, size_bytes in progress.bytes_by_tier.items():
            self.state_peaks[tier] = max(size_bytes, self.state_peaks.get(tier, 0))
        self.device_peak_bytes = _most(self.device_peak_bytes, progress.device_peak_bytes)
        self.host_peak_bytes = _most(self.host_peak_bytes, progress.host_peak_bytes)
        if progress.waits is not None:
            self.waits.append(progress.waits)
        self.last = progress

    def mean_waits(self) -> Waits | None:
        """Average what traced steps have waited for; what binds is what most often does."""
        if not self.waits:
            return None
        rows: defaultdict[str, float] = defaultdict(float)
        for waits in self.waits:
            for row, share in waits.rows.items():
                rows[row] += share / len(self.waits)
        bound_by = [waits.bound_by for waits in self.waits]
        ordered = dict(sorted(rows.items(), key=lambda item: -item[1]))
        waited = sum(waits.waited for waits in self.waits) / len(self.waits)
        return Waits(waited, ordered, max(bound_by, key=bound_by.count))

    def measured_seconds(self) -> dict[str, float]:
        """List the seconds of a step, and those in which each resource worked: the median of traced steps."""
        if not self.waits:
            return {}
        names = dict.fromkeys(name for waits in self.waits for name in waits.busy_seconds)
        busy = {name: median(waits.busy_seconds.get(name, 0.0) for waits in self.waits) for name in names}
        return {"step": median(waits.seconds for waits in self.waits)} | busy

    def rows(self, model: str = "") -> list[tuple[str, str]]:
        """List what people are told at the end: what is known, each with its name.

        Arguments:
            model: where the model is; empty where nothing is said of that.
        """
        rows: list[tuple[str, str]] = []
        last = self.last
        if last is not None:
            pace = self.token_count / self.training_seconds if self.training_seconds else 0.0
            tokens = f"{self.token_count:,} tokens, {pace:,.0f} a second"
            rows.append(("steps", f"{last.step:,}/{last.steps:,} in {format_seconds(last.seconds)}, {tokens}"))
        if self.losses:
            rows.append(("held-out loss", self._losses()))
        if self.state_peaks:
            rows.append(("state", format_sizes(self.state_peaks)))
        peaks = [("device", self.device_peak_bytes), ("process", self.host_peak_bytes)]
        told = ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in peaks if size_bytes is not None)
        if told:
            rows.append(("peak memory", told))
        waits = self.mean_waits()
        if waits is not None:
            rows.append(("waited", str(waits)))
        if model:
            rows.append(("model", model))
        return rows

    def to_dict(self) -> dict[str, object]:
        """List what the last line of `metrics.jsonl` says."""
        values: dict[str, object] = {"token_count": self.token_count, "peak_bytes_by_tier": self.state_peaks}
        values |= {"device_peak_bytes": self.device_peak_bytes, "host_peak_bytes": self.host_peak_bytes}
        best = self.best_step()
        if best is not None:
            values |= {"best_loss": self.losses[best], "best_step": best}
        waits = self.mean_waits()
        return {name: value for name, value in values.items() if value is not None} | (waits.to_dict() if waits else {})

    def best_step(self) -> int | None:
        """Find the evaluation with the lowest loss; `None` without one that is finite."""
        finite = [step for step, loss in self.losses.items() if math.isfinite(loss)]
        return min(finite, key=lambda step: self.losses[step], default=None)

    def _losses(self) -> str:
        """Write the first, the last and the lowest held-out loss."""
        steps = list(self.losses)
        words = [f"{self.losses[steps[0]]:.4f} after step {steps[0]:,}"]
        if len(steps) > 1:
            words.append(f"{self.losses[steps[-1]]:.4f} after step {steps[-1]:,}")
        best = self.best_step()
        if best is not None and len(steps) > 2:
            words.append(f"lowest {self.losses[best]:.4f} after step {best:,}")
        return ", ".join(words)


def _most(*sizes: int | None) -> int | None:
    """Return the largest of the sizes that are known."""
    return max((size for size in sizes if size is not None), default=None)
