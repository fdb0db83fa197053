"""The lowest held-out loss of a run, and how long it was not lowered."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock.cli.ranks import Ranks
from penstock.cli.training.reporting.reports import Reports
from penstock.errors import CheckpointError
from penstock.integrations.engine_internals import read_manifest


@dataclass
class Best:
    """What evaluations have come to. Every rank has the same one, because every rank has the same losses.

    Attributes:
        loss: the lowest so far, in nats per token; `None` where none was a number.
        step: the step after which it was measured.
        counted_step: the step of the last evaluation that was counted.
        since_count: evaluations since the lowest one, none of them lower.
    """

    loss: float | None = None
    step: int = 0
    counted_step: int = 0
    since_count: int = 0

    def count(self, step: int, loss: float) -> bool:
        """Count an evaluation; one that was counted already, before a resume, counts no more.

        Returns:
            Whether it is the lowest so far. A loss that is not finite never is.
        """
        if step <= self.counted_step:
            return False
        self.counted_step = step
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.step, self.since_count = loss, step, 0
            return True
        self.since_count += 1
        return False

    def to_dict(self) -> dict[str, Any]:
        """Write it as JSON, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, value: object) -> "Best | None":
        """Read what `to_dict` has written; `None` where it is something else, which anybody may have written."""
        if not isinstance(value, dict) or value.keys() != asdict(cls()).keys():
            return None
        loss = value["loss"]
        counts = [value[name] for name in ("step", "counted_step", "since_count")]
        if any(not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < 1 << 53 for each in counts):
            return None
        if loss is not None and not (isinstance(loss, float) and math.isfinite(loss)):
            return None
        return cls(**value)


class BestCheckpoint:
    """The checkpoint with the lowest held-out loss, to which a run goes back at its end. Every rank makes every call.

    Arguments:
        folder: of the checkpoint.
        optimizer: of the prepared model.
        ranks: the place of this process.
        reports: who is told.
    """

    def __init__(self, folder: Path, optimizer: penstock.Optimizer, ranks: Ranks, reports: Reports) -> None:
        self._folder = folder
        self._optimizer = optimizer
        self._ranks = ranks
        self._reports = reports

    def look(self, best: Best) -> None:
        """Say what becomes of a run that goes on, and whose checkpoint is not there as it left it."""
        if best.loss is not None and (why := self._missing(best)):
            self._reports.note(
                f"{why}. The lowest held-out loss stays {best.loss:.4f}, after step {best.step}: without a lower one "
                "the run ends with its last weights"
            )

    def go_back(self, best: Best, step: int) -> bool:
        """Load the checkpoint into the model of a run that ends after a step, if that is another one.

        Returns:
            Whether the model is now that of the lowest loss.
        """
        if best.loss is None or best.step == step:
            return best.loss is not None
        why = self._missing(best)
        if not self._ranks.any(bool(why)):
            try:
                # Verified first: the weights of the last step are better than parts of both.
                self._optimizer.load(self._folder, verify=True)
            except CheckpointError as error:
                why = str(error)
            else:
                self._reports.note(f"back to step {best.step}, whose held-out loss {best.loss:.4f} is the lowest")
                return True
        self._reports.note(f"the held-out loss was lowest after step {best.step}; the model is of the last step. {why}")
        return False

    def _missing(self, best: Best) -> str:
        """Say on the first rank why the checkpoint of the lowest loss cannot be loaded; nothing where it can be."""
        if not self._ranks.is_first:
            return ""
        if not self._folder.exists():
            return f"{self._folder} is missing"
        try:
            extra: Any = read_manifest(self._folder).extra
        except CheckpointError as error:
            return str(error).rstrip(".")
        # Its own lowest loss, as it was saved: a folder may be of another run.
        own = Best.of(extra.get("best")) if isinstance(extra, dict) else None
        is_it = own is not None and (own.step, own.loss, own.counted_step) == (best.step, best.loss, best.step)
        return "" if is_it else f"{self._folder} is not of step {best.step}, or of another run"
