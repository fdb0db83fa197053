"""How far a run is, as a value: what the display shows and `metrics.jsonl` keeps."""

from dataclasses import dataclass
from typing import Protocol

TIERS = ("device", "cpu", "nvme")


class Report(Protocol):
    """The part of `penstock.LocationReport` that is read here."""

    def bytes(self, *, tier: str) -> int:
        """Bytes on a tier."""


@dataclass(frozen=True)
class Progress:
    """One line of a run, after a step.

    Arguments:
        step: steps done, from 1.
        steps: steps in all.
        loss: mean over the ranks and micro-batches since the last line, nats per token.
        grad_norm: of the last step, before clipping.
        lr: of the last step.
        tokens_per_second: of all ranks together, since the last line.
        seconds: since the first step began.
        skipped_count: steps skipped so far because a gradient was not finite.
        bytes_by_tier: of training state on this rank, tiers that hold some.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    seconds: float
    skipped_count: int
    bytes_by_tier: dict[str, int]

    @property
    def seconds_left(self) -> float:
        """Seconds to the last step at the pace so far."""
        return self.seconds / self.step * (self.steps - self.step)


def bytes_by_tier(report: Report) -> dict[str, int]:
    """Bytes of training state on each tier that holds some."""
    sizes = {tier: report.bytes(tier=tier) for tier in TIERS}
    return {tier: size_bytes for tier, size_bytes in sizes.items() if size_bytes}


def format_bytes(size_bytes: int) -> str:
    """A size for people: `17.3 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """A duration for people: `2:05`, `1:02:05`."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
