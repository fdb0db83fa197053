"""What a run leaves for programs: `metrics.jsonl`, one JSON object a line, and TensorBoard events."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO, Any

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.progress import Progress
from penstock.errors import ConfigError

METRICS_NAME = "metrics.jsonl"


class Metrics:
    """Writes events as they happen. A line is on disk when the call returns, so that others can follow."""

    def __init__(self, file: IO[str] | None, writer: Any | None) -> None:
        self._file = file
        self._writer = writer

    def start(self, **about: object) -> None:
        """What runs: settings, sizes, versions."""
        self._line({"event": "start", **about})

    def step(self, progress: Progress) -> None:
        """A line of the training loop."""
        values = {
            "loss": progress.loss,
            "grad_norm": progress.grad_norm,
            "lr": progress.lr,
            "tokens_per_second": progress.tokens_per_second,
        }
        counts = {"skipped_count": progress.skipped_count, "bytes_by_tier": progress.bytes_by_tier}
        self._line({"event": "step", "step": progress.step, **values, "seconds": progress.seconds, **counts})
        self._scalars({f"train/{name}": value for name, value in values.items()}, progress.step)

    def evaluation(self, step: int, loss: float, seconds: float) -> None:
        """The held-out loss after `step` steps, nats per token."""
        self._line({"event": "eval", "step": step, "loss": loss, "seconds": seconds})
        self._scalars({"eval/loss": loss}, step)

    def end(self, **about: object) -> None:
        """What came out."""
        self._line({"event": "end", **about})

    def _line(self, event: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({k: _json_value(v) for k, v in event.items()}, allow_nan=False) + "\n")
            self._file.flush()

    def _scalars(self, values: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def check_tensorboard() -> None:
    """Refuse `--tensorboard` where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard needs TensorBoard. Install it with: pip install 'penstock[tensorboard]'")


@contextmanager
def open_metrics(config: TrainConfig, *, is_first_rank: bool, goes_on: bool = False) -> Iterator[Metrics]:
    """The metrics of a run in its folder; none on ranks but the first.

    Those of an earlier run there are replaced, or added to if this one goes on from it.
    """
    if not is_first_rank:
        yield Metrics(None, None)
        return
    writer = None
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(config.out / "tensorboard"))
    try:
        with (config.out / METRICS_NAME).open("a" if goes_on else "w", encoding="utf-8") as file:
            yield Metrics(file, writer)
    finally:
        if writer is not None:
            writer.close()


def _json_value(value: object) -> object:
    """JSON has no NaN or infinity: a number that is not finite is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
