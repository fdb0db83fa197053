"""What people see: a panel and lines on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace

from penstock.cli.training.reporting.progress import Progress
from penstock.cli.training.reporting.waits import Waits

PASSING_SECONDS = 10.0


class Display(AbstractContextManager["Display"]):
    """Standard output of the rank that tells. Used as a context, which gives the terminal back at its end."""

    def __init__(self) -> None:
        self.panel = Panel() if sys.stdout.isatty() else None
        self._passed_seconds = time.monotonic()
        self._shown: Progress | None = None  # in the panel alone, which will be taken away

    def __exit__(self, *error: object) -> None:
        self._close_panel()

    def _close_panel(self) -> None:
        """Take the panel away. Its numbers stay as a line: also of a run that ends before its last step."""
        if self.panel is not None:
            self.panel.close()  # before the line, which would be printed into it
            if self._shown is not None:
                print(self._shown.line(), flush=True)
                self._shown = None

    def note(self, text: str) -> None:
        """Print a text that stays."""
        if self.panel is not None:
            self.panel.print_above(text)
        else:
            print(text, flush=True)

    def passing(self, text: str) -> None:
        """Show a text over the one before; where nothing can be taken back, print one every `PASSING_SECONDS`."""
        now = time.monotonic()
        if self.panel is not None:
            self.panel.show_text(text)
        elif now - self._passed_seconds >= PASSING_SECONDS:
            self._passed_seconds = now
            print(text, flush=True)

    def step(self, progress: Progress) -> None:
        """Show how far training is; the last line stays."""
        if self.panel is None:
            print(progress.line(), flush=True)
            return
        self.panel.show(progress)
        self._shown = progress
        if progress.step == progress.steps:
            self._close_panel()

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Print names and what is said of them."""
        if self.panel is not None:
            self._close_panel()
            self.panel.print_table(rows)
            return
        width = max(len(name) for name, _ in rows)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in rows), flush=True)


class Panel:
    """A bar and the latest numbers at the bottom of a terminal, from the first step to the last."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._waits: Waits | None = None
        self._is_text = False

    def show_text(self, text: str) -> None:
        """Draw a line in the panel's place, until something else is shown or printed."""
        from rich.text import Text

        self._is_text = True
        self._live.start()
        self._live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    def print_above(self, text: str) -> None:
        """Print a text that stays, above the panel."""
        if self._is_text:
            self.close()
        self._console.print(text, markup=False, soft_wrap=True)

    def print_table(self, rows: list[tuple[str, str]]) -> None:
        """Print names and what is said of them, in a frame."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ROUNDED, show_header=False)
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self.close()
        self._console.print(table)

    def show(self, progress: Progress) -> None:
        """Draw the panel, over the one before. What steps wait for stays until it is measured again."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        self._waits = progress.waits or self._waits
        numbers = replace(progress, waits=self._waits).numbers()
        table = Table.grid(padding=(0, 3))
        table.add_row(*(name for name, _ in numbers), style="dim")
        table.add_row(*(value for _, value in numbers))
        self._is_text = False
        bar = Table.grid(padding=(0, 1), expand=False)
        bar.add_row(f"step {progress.step}/{progress.steps}", ProgressBar(progress.steps, progress.step, width=40))
        self._live.start()  # does nothing but the first time
        self._live.update(Group(bar, table), refresh=True)

    def close(self) -> None:
        """Take the panel away and give the terminal back."""
        self._is_text = False
        self._live.stop()
