"""What is told after a step."""

from dataclasses import asdict, dataclass
from typing import Any

from penstock.cli.training.reporting.formats import format_bytes, format_seconds, format_sizes
from penstock.cli.training.reporting.spread import Spread
from penstock.cli.training.reporting.waits import Waits


@dataclass(frozen=True)
class Progress:
    """How far a run is after a step.

    Attributes:
        step: steps done, from 1.
        steps: steps in all.
        loss: mean over the ranks and micro-batches since the last report, in nats per token.
        grad_norm: norm of the last step's gradient, before clipping.
        lr: learning rate of the last step.
        tokens_per_second: tokens of all ranks together, since the last report.
        seconds: seconds since the first step began.
        skipped_count: steps skipped so far because a gradient was not finite.
        bytes_by_tier: training state on this rank, tiers that hold some.
        mfu: model FLOPs utilisation since the last report, see `Speed`; `None` where the device's peak is not known.
        device_peak_bytes: most device memory that torch has had in use since the last report; `None` on a cpu.
        host_peak_bytes: most host memory that this process has had resident; `None` where the system does not say.
        waits: what steps wait for; `None` where no step was traced since the last report.
        begin: steps that were made before this process began, as of a run that goes on.
        spread: how evenly the ranks work; `None` where no step was traced since the last report.
        token_count: tokens of all ranks together, since the last report.
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
    mfu: float | None = None
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    waits: Waits | None = None
    begin: int = 0
    spread: Spread | None = None
    token_count: int = 0

    @property
    def seconds_left(self) -> float:
        """Estimate the seconds to the last step, at the pace of this process so far."""
        return self.seconds / max(1, self.step - self.begin) * (self.steps - self.step)

    def to_dict(self) -> dict[str, Any]:
        """List what `metrics.jsonl` says of a step: what is not known is left out, and so are the settings' numbers."""
        values = asdict(self)
        del values["steps"], values["begin"], values["token_count"], values["waits"], values["spread"]
        known = {name: value for name, value in values.items() if value is not None}
        for more in (self.waits, self.spread):
            known |= {} if more is None else more.to_dict()
        return known

    def scalars(self) -> dict[str, float]:
        """List the numbers that trackers draw over the steps."""
        values = self.to_dict()
        names = (
            "loss",
            "grad_norm",
            "lr",
            "tokens_per_second",
            "mfu",
            "device_peak_bytes",
            "host_peak_bytes",
            "waited",
        )
        return {f"train/{name}": values[name] for name in names if name in values}

    def numbers(self) -> list[tuple[str, str]]:
        """List what people are shown, each number with its name."""
        numbers = [
            ("loss", f"{self.loss:.4f}"),
            ("grad norm", f"{self.grad_norm:.3f}"),
            ("lr", f"{self.lr:.2e}"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
        ]
        if self.mfu is not None:
            numbers.append(("MFU", f"{self.mfu:.1%}"))
        numbers.append(("state", format_sizes(self.bytes_by_tier)))
        if self.device_peak_bytes is not None:
            numbers.append(("peak", format_bytes(self.device_peak_bytes)))
        if self.waits is not None:
            numbers.append(("waited", str(self.waits)))
        if self.spread is not None and str(self.spread):
            numbers.append(("slow", str(self.spread)))
        numbers.append(("left", format_seconds(self.seconds_left)))
        return [*numbers, ("skipped", str(self.skipped_count))] if self.skipped_count else numbers

    def line(self) -> str:
        """Write the numbers in one line."""
        numbers = "  ".join(f"{name} {value}" for name, value in self.numbers())
        return f"step {self.step:>{len(str(self.steps))}}/{self.steps}  {numbers}"
