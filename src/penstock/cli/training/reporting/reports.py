"""What a run tells while it trains: people on standard output, programs in `metrics.jsonl` and trackers."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from penstock import LocationReport
from penstock.cli.reporting.page import INSTALL, plotly_script, write_page
from penstock.cli.reporting.run import METRICS_NAME
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.reporting.display import Display
from penstock.cli.training.reporting.formats import printable
from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.samples import Sample
from penstock.cli.training.reporting.summary import Summary
from penstock.cli.training.reporting.trackers import Trackers
from penstock.errors import one_line
from penstock.files import Lines
from penstock.planner import Plan, block


class Reports(AbstractContextManager["Reports"]):
    """Tells of a run, on the first rank alone; on others every call does nothing. Used as a context, closed at its end.

    Arguments:
        config: the settings, which say where files go.
        is_first_rank: whether this rank tells anything.
    """

    def __init__(self, config: TrainConfig, *, is_first_rank: bool) -> None:
        self._config = config
        self._is_first_rank = is_first_rank
        self._closing = ExitStack()
        self._display = self._closing.enter_context(Display()) if is_first_rank else None
        self._metrics: Lines | None = None
        self._trackers = Trackers(config.report_to if is_first_rank else (), self.note)
        self._summary = Summary()
        self._plan: Plan | None = None
        self._is_placed = False

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def note(self, text: str) -> None:
        """Print a text that stays."""
        if self._display is not None:
            self._display.note(text)

    def passing(self, text: str) -> None:
        """Tell how far something is that takes a while; the next such text takes its place."""
        if self._display is not None:
            self._display.passing(text)

    def start(self, *, goes_on: bool = False, **about: object) -> None:
        """Open the files and trackers, and write what runs: settings, sizes, versions.

        What an earlier run has left in the folder is replaced, or added to where this run goes on from it. So this is
        called when nothing of the request can be refused any more.
        """
        if not self._is_first_rank:
            return
        self._metrics = Lines(self._config.out / METRICS_NAME)
        self._closing.callback(self._metrics.close)
        self._metrics.begin(goes_on=goes_on)
        self._write("start", about)
        self._closing.callback(self._trackers.close)
        asked = about.pop("config", {})
        settings = (asked if isinstance(asked, dict) else {}) | about  # what was found out, where both say something
        self._trackers.open(self._config.out, settings, goes_on=goes_on)

    def planned(self, chosen: Plan) -> None:
        """Tell what a plan has chosen, and what it predicts: at the end that is held against what was measured."""
        self._plan = chosen
        self.note(block(chosen))

    def step(self, progress: Progress) -> None:
        """Tell how far training is."""
        if self._display is None:
            return
        self._summary.add(progress)
        self._display.step(progress)
        self._write("step", progress.to_dict())
        self._trackers.log(progress.scalars(), progress.step)

    def placement(self, step: int, report: LocationReport) -> None:
        """Tell where every byte is after `step` steps, once: steps are warm by the first report."""
        if self._metrics is not None and not self._is_placed:
            self._is_placed = True
            self._write("placement", {"step": step, "rows": report.to_dict()["rows"]})

    def evaluation(
        self, step: int, loss: float, seconds: float, *, token_name: str, is_best: bool | None = None
    ) -> None:
        """Tell the held-out loss after `step` steps, in nats per token, and how long it took to measure.

        Arguments:
            step: steps that were made.
            loss: the mean over the held-out tokens.
            seconds: what measuring took.
            token_name: what a token is, in the singular.
            is_best: whether no loss before was as low; `None` where nobody keeps count.
        """
        self._summary.losses[step] = loss
        perplexity = perplexity_of(loss)
        best = ", the lowest so far" if is_best else ""
        self.note(
            f"held-out loss {loss:.4f} nats per {token_name} after {step} steps, perplexity {perplexity:.4g}{best}"
        )
        values: dict[str, Any] = {"step": step, "loss": loss, "perplexity": perplexity, "seconds": seconds}
        self._write("eval", values if is_best is None else values | {"is_best": is_best})
        self._trackers.log({"eval/loss": loss, "eval/perplexity": perplexity}, step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Tell what the model writes after `step` steps."""
        for sample in samples:
            self.note(f"sample:\n{printable(sample.prompt + sample.text)}")
            self._write("sample", {"step": step, "prompt": sample.prompt, "text": sample.text})

    def end(self, *, model: str = "", **about: object) -> None:
        """Tell what came out.

        Arguments:
            model: where the model is; empty where nothing is said of that.
            about: what else the last line of `metrics.jsonl` holds.
        """
        rows = self._summary.rows(model)
        if self._display is not None and rows:
            self._display.table(rows)
        if self._plan is not None:
            measured = self._summary.measured_seconds()
            self.note(block(self._plan, measured) if measured else "plan: too few steps to hold it against a trace")
        self._write("end", about | self._summary.to_dict())
        if self._metrics is not None:
            self._page()

    def _page(self) -> None:
        """Make the run's page where plotly is installed, else say how. Nothing in it can fail a run."""
        try:
            if plotly_script() is None:
                self.note(f"a page of this run: {INSTALL}, and then penstock report {self._config.out}")
            else:
                self.note(f"a page of this run is {write_page([self._config.out])}")
        except Exception as error:
            self.note(f"warning: the run's page was not made: {one_line(error)}")

    def _write(self, event: str, values: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`."""
        if self._metrics is not None:
            self._metrics.write(event, values)


def perplexity_of(loss: float) -> float:
    """Raise e to a loss in nats; infinity where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
