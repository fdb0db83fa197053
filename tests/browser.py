"""A page in a real browser, where one is installed: what it says to its console, and what is drawn."""

import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
#: Elements that plotly makes for points, lines, areas and bars.
MARKS = ("point", "js-line", "js-fill")


@dataclass
class Drawn(HTMLParser):
    """What a browser has made of a page.

    Attributes:
        console: what scripts and the browser have said.
        marks: by the id of each figure, how much is drawn in it.
        tags: how many elements there are of each kind, outside of charts.
        texts: all text outside of scripts and styles.
        drawn: how many charts the page's script says it has drawn.
    """

    console: list[str]
    marks: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    drawn: int = 0

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._figure = ""
        self._silent = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        about = dict(attributes)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._silent = tag in ("script", "style")
        if tag == "body":
            self.drawn = int(about.get("data-drawn") or 0)
        if tag == "figure":
            self._figure = about.get("id") or ""
            self.marks[self._figure] = 0
        elif self._figure and set((about.get("class") or "").split()) & set(MARKS):
            self.marks[self._figure] += 1

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        if tag == "figure":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def open_page(page: Path, profile: Path) -> Drawn:
    """Open a file in a browser without a window, and read what has become of it."""
    if BROWSER is None:
        pytest.skip("no chromium is installed")
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-extensions", "--no-first-run", f"--user-data-dir={profile}"),
            *("--window-size=1280,900", "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom"),
            page.resolve().as_uri(),
        ],
        capture_output=True,
        timeout=240,
        check=False,
    )
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, errors[-2000:]
    drawn = Drawn([line for line in errors.splitlines() if "CONSOLE" in line])
    drawn.feed(done.stdout.decode())
    return drawn


def assert_drawn(drawn: Drawn, *, charts: set[str]) -> None:
    """No error, every chart has marks, and those are there that are expected."""
    assert drawn.console == []
    assert "The charts cannot be drawn" not in drawn.text
    assert charts <= drawn.marks.keys(), drawn.marks
    assert drawn.drawn == len(drawn.marks)
    assert [name for name, count in drawn.marks.items() if not count] == []
