"""What a run tells while it trains: people on standard output, programs in `metrics.jsonl` and TensorBoard's events."""

import json
import math
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import IO, Any

import penstock
from penstock.cli.training.config import TrainConfig
from penstock.errors import ConfigError

METRICS_NAME = "metrics.jsonl"
TIERS = ("device", "cpu", "nvme")
_MOST_EXPONENT = 700.0  # of what a float holds


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
        """Estimate the seconds to the last step, at the pace so far."""
        return self.seconds / self.step * (self.steps - self.step)

    def numbers(self) -> list[tuple[str, str]]:
        """List what people are shown, each number with its name."""
        sizes = " ".join(f"{tier} {format_bytes(size_bytes)}" for tier, size_bytes in self.bytes_by_tier.items())
        numbers = [
            ("loss", f"{self.loss:.4f}"),
            ("grad norm", f"{self.grad_norm:.3f}"),
            ("lr", f"{self.lr:.2e}"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("state", sizes),
            ("left", format_seconds(self.seconds_left)),
        ]
        return [*numbers, ("skipped", str(self.skipped_count))] if self.skipped_count else numbers

    def line(self) -> str:
        """Write the numbers in one line."""
        numbers = "  ".join(f"{name} {value}" for name, value in self.numbers())
        return f"step {self.step:>{len(str(self.steps))}}/{self.steps}  {numbers}"


class Reports(AbstractContextManager["Reports"]):
    """Tells of a run, on the first rank alone; on others every call does nothing. Used as a context, closed at its end.

    Arguments:
        config: the settings, which say where files go.
        is_first_rank: whether this rank tells anything.
    """

    def __init__(self, config: TrainConfig, *, is_first_rank: bool) -> None:
        self._config = config
        self._is_first_rank = is_first_rank
        self._panel = Panel() if is_first_rank and sys.stdout.isatty() else None
        self._metrics: IO[str] | None = None
        self._writer: Any = None
        self._closing = ExitStack()

    def __exit__(self, *error: object) -> None:
        if self._panel is not None:
            self._panel.close()
        self._closing.close()

    def note(self, text: str) -> None:
        """Print a text that stays."""
        if self._panel is not None:
            self._panel.print_above(text)
        elif self._is_first_rank:
            print(text, flush=True)

    def start(self, *, goes_on: bool = False, **about: object) -> None:
        """Open the files, and write what runs: settings, sizes, versions.

        What an earlier run has left in the folder is replaced, or added to where this run goes on from it. So this is
        called when nothing of the request can be refused any more.
        """
        if not self._is_first_rank:
            return
        if "tensorboard" in self._config.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._config.out / "tensorboard"))
            self._closing.callback(self._writer.close)
        path = self._config.out / METRICS_NAME
        self._metrics = self._closing.enter_context(path.open("a" if goes_on else "w", encoding="utf-8"))
        self._line("start", about)

    def step(self, progress: Progress) -> None:
        """Tell how far training is."""
        is_last = progress.step == progress.steps
        if self._panel is not None:
            self._panel.show(progress)
            if is_last:
                self._panel.close()  # before the line below, which would be printed into it
        if self._is_first_rank and (self._panel is None or is_last):
            print(progress.line(), flush=True)
        values = asdict(progress)
        del values["steps"]  # which the settings have
        self._line("step", values)
        scalars = ("loss", "grad_norm", "lr", "tokens_per_second")
        self._scalars({f"train/{name}": values[name] for name in scalars}, progress.step)

    def evaluation(self, step: int, loss: float, seconds: float, *, token_name: str) -> None:
        """Tell the held-out loss after `step` steps, in nats per token, and how long it took to measure."""
        perplexity = math.exp(loss) if loss < _MOST_EXPONENT else math.inf
        self.note(f"held-out loss {loss:.4f} nats per {token_name} after {step} steps, perplexity {perplexity:.4g}")
        self._line("eval", {"step": step, "loss": loss, "perplexity": perplexity, "seconds": seconds})
        self._scalars({"eval/loss": loss}, step)

    def end(self, **about: object) -> None:
        """Write what came out."""
        self._line("end", about)

    def _line(self, event: str, values: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        if self._metrics is not None:
            line = {"event": event} | {name: _json_value(value) for name, value in values.items()}
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()  # now, so that others can follow the run

    def _scalars(self, values: dict[str, float], step: int) -> None:
        """Write numbers for TensorBoard."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


class Panel:
    """A bar and the latest numbers at the bottom of a terminal, from the first step to the last."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def print_above(self, text: str) -> None:
        """Print a text that stays, above the panel."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """Draw the panel, over the one before."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        numbers = progress.numbers()
        table = Table.grid(padding=(0, 3))
        table.add_row(*(name for name, _ in numbers), style="dim")
        table.add_row(*(value for _, value in numbers))
        bar = Table.grid(padding=(0, 1), expand=False)
        bar.add_row(f"step {progress.step}/{progress.steps}", ProgressBar(progress.steps, progress.step, width=40))
        self._live.start()  # does nothing but the first time
        self._live.update(Group(bar, table), refresh=True)

    def close(self) -> None:
        """Take the panel away and give the terminal back."""
        self._live.stop()


def check_tensorboard() -> None:
    """Refuse `--report-to tensorboard` where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "--report-to tensorboard needs TensorBoard. Install it with: pip install 'penstock[tensorboard]'"
        )


def bytes_by_tier(report: penstock.LocationReport) -> dict[str, int]:
    """Sum up the bytes of training state on each tier that holds some."""
    return {tier: size_bytes for tier in TIERS if (size_bytes := report.bytes(tier=tier))}


def format_bytes(size_bytes: int) -> str:
    """Write a size for people: `17.3 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: `2:05`, `1:02:05`."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def _json_value(value: object) -> object:
    """Write a number that is not finite as null: JSON has no NaN or infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Replace control characters, which could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
