"""What a run shows people: a live panel on a terminal, plain lines elsewhere, nothing on ranks but the first."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from penstock.cli.training.progress import Progress, format_bytes, format_seconds


class Display(Protocol):
    """Where a run says what it does."""

    def note(self, text: str) -> None:
        """Say something that stays."""

    def show(self, progress: Progress) -> None:
        """Say how far training is."""


class NoDisplay:
    """Says nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def show(self, progress: Progress) -> None:
        """Say nothing."""


class PlainDisplay:
    """One line of text for each thing said."""

    def note(self, text: str) -> None:
        """Print the text."""
        print(text, flush=True)

    def show(self, progress: Progress) -> None:
        """Print one line of numbers."""
        numbers = "  ".join(f"{name} {value}" for name, value in _numbers(progress))
        print(f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}  {numbers}", flush=True)


class LiveDisplay:
    """A bar and the latest numbers at the bottom of a terminal, from the first step to the last."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._is_started = False

    def note(self, text: str) -> None:
        """Print the text above the panel."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """Redraw the panel; after the last step it is replaced by the last numbers."""
        if not self._is_started:
            self._live.start()
            self._is_started = True
        self._live.update(_panel(progress), refresh=True)
        if progress.step == progress.steps:
            self.close()
            PlainDisplay().show(progress)

    def close(self) -> None:
        """Take the panel away and give the terminal back."""
        if self._is_started:
            self._live.stop()
            self._is_started = False


@contextmanager
def open_display(*, is_first_rank: bool) -> Iterator[Display]:
    """The display that suits this rank and its standard output."""
    if not is_first_rank:
        yield NoDisplay()
    elif not sys.stdout.isatty():
        yield PlainDisplay()
    else:
        display = LiveDisplay()
        try:
            yield display
        finally:
            display.close()


def _numbers(progress: Progress) -> list[tuple[str, str]]:
    sizes = " ".join(f"{tier} {format_bytes(size_bytes)}" for tier, size_bytes in progress.bytes_by_tier.items())
    numbers = [
        ("loss", f"{progress.loss:.4f}"),
        ("grad norm", f"{progress.grad_norm:.3f}"),
        ("lr", f"{progress.lr:.2e}"),
        ("tokens/s", f"{progress.tokens_per_second:,.0f}"),
        ("state", sizes),
        ("left", format_seconds(progress.seconds_left)),
    ]
    return [*numbers, ("skipped", str(progress.skipped_count))] if progress.skipped_count else numbers


def _panel(progress: Progress) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    table.add_row(*(name for name, _ in _numbers(progress)), style="dim")
    table.add_row(*(value for _, value in _numbers(progress)))
    bar = Table.grid(padding=(0, 1), expand=False)
    bar.add_row(f"step {progress.step}/{progress.steps}", ProgressBar(progress.steps, progress.step, width=40))
    return Group(bar, table)
