"""Data as training sees it: sequences with what of them is learned, and what became of all rows.

Here it is text for people alone. What is shown comes from whatever reads, encodes and packs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

#: What stands around learned text where there is no colour.
BEGIN, END = "⟦", "⟧"
_TRAINED, _OTHER, _MARK = "green", "dim", "bold cyan"
#: How much of a segment is shown, its first and last characters together.
MOST_CHARS = 4000


class Run(Protocol):
    """Consecutive tokens that are all learned, or all not.

    Attributes:
        text: the tokens' text, special tokens as the tokenizer writes them.
        trained: whether they are labels.
    """

    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def trained(self) -> bool: ...  # noqa: D102


class ShownSegment(Protocol):
    """A row, or a part of one, in a sequence. Segments of a sequence do not see each other.

    Attributes:
        where: file and row.
        kind: what the row holds: `text`, `messages`, `prompt-completion`.
        runs: its tokens in their order.
    """

    @property
    def where(self) -> str: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def runs(self) -> Sequence[Run]: ...  # noqa: D102


#: Numbers by their names, in the order in which they are shown. A name with `share` is of a number from 0 to 1.
Statistics = Mapping[str, int | float | str]


def show(sequences: Iterable[Sequence[ShownSegment]], statistics: Statistics, console: Console) -> None:
    """Print sequences, then statistics.

    On a terminal with colours what is learned is green and the rest dim; elsewhere it is in `⟦ ⟧`, so that it can be
    read in a log.

    Arguments:
        sequences: each a list of its segments.
        statistics: of all rows.
        console: where it is printed.
    """
    coloured = console.color_system is not None
    for number, segments in enumerate(sequences, start=1):
        for place, segment in enumerate(segments):
            head = f"sequence {number}: " if place == 0 else "segment boundary: "
            title = Text(f"{head}{visible(segment.where)} ({visible(segment.kind)})", style=_MARK)
            console.print(title, soft_wrap=True)
            console.print(marked(segment, coloured=coloured), soft_wrap=True)
        console.print()
    width = max(map(len, statistics), default=0)
    for name, value in statistics.items():
        console.print(Text(f"{visible(name):<{width}}  {_number(name, value)}"), soft_wrap=True)


def marked(segment: ShownSegment, *, coloured: bool) -> Text:
    """Write a segment with a mark of what is learned: colours, or brackets."""
    shown = Text()
    for run, text in _shortened(segment.runs):
        plain = visible(text)
        if coloured:
            shown.append(plain, style=_TRAINED if run.trained else _OTHER)
        else:
            # Brackets of the data's own would read as marks.
            escaped = plain.replace(BEGIN, "\\u27e6").replace(END, "\\u27e7")
            shown.append(f"{BEGIN}{escaped}{END}" if run.trained else escaped)
    return shown


def visible(text: str) -> str:
    r"""Write a text so that it steers no terminal: a line ends with a sign, other characters are printed or are codes.

    Example:
        >>> print(visible("a\tb\x1b[2J"))
        a\tb\x1b[2J
    """
    return "".join(
        char if char.isprintable() else "↵\n" if char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def _shortened(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """Leave out the middle of a text that is too long to read."""
    left_out = sum(len(run.text) for run in runs) - MOST_CHARS
    if left_out <= 0:
        return [(run, run.text) for run in runs]
    begin, end = MOST_CHARS // 2, MOST_CHARS // 2 + left_out
    kept: list[tuple[Run, str]] = []
    place = 0
    for run in runs:
        head, tail = run.text[: max(0, begin - place)], run.text[max(0, end - place) :]
        if place <= begin < place + len(run.text):
            head += f" [... {left_out:,} characters ...] "
        place += len(run.text)
        if head or tail:
            kept.append((run, head + tail))
    return kept


def _number(name: str, value: float | str) -> str:
    """Write a number for people."""
    if isinstance(value, str):
        return visible(value)
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
