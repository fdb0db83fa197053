"""A look at rows as training reads them: their tokens, and which of them have a loss."""

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.train.data import CHECKED, Encoder, place_of

#: What stands around learned text where there is no colour.
BEGIN, END = "⟦", "⟧"
#: How many tokens of a row are shown, its first and last ones.
MOST_TOKENS = 1000


def show(rows: Any, tokenizer: Any, training: Any, console: Console, count: int = 2) -> None:
    """Print the first rows with their labels, and how many tokens of the first `CHECKED` rows are cut.

    On a terminal with colours what is learned is green and the rest dim; elsewhere it is in `⟦ ⟧`, so that it can be
    read in a log.

    Arguments:
        rows: a `Dataset` or an `IterableDataset`, as `read_data` gives it.
        tokenizer: a tokenizer of transformers.
        training: TRL's SFTConfig.
        console: where it is printed.
        count: how many rows.
    """
    first = Head(rows, tokenizer, training)
    for number, (row, (ids, labels)) in enumerate(zip(first.rows[:count], first.tokens, strict=False)):
        console.print(Text(visible(place_of(row, rows, number)), style="bold cyan"), soft_wrap=True)
        ids, labels = ids[first.kept], labels[first.kept]
        console.print(marked(tokenizer, ids, labels, console.color_system is not None), soft_wrap=True)
        console.print()
    console.print(first.lengths, soft_wrap=True, highlight=False)


class Head:
    """The first `CHECKED` rows, encoded.

    Arguments:
        rows, tokenizer, training: as for `show`.

    Attributes:
        rows: the rows.
        tokens: ids and labels of each.
        kept: what of a row `max_length` leaves.
        is_cut: True if a row loses tokens.
        lengths: how many tokens there are, and how many are lost, in words.
    """

    def __init__(self, rows: Any, tokenizer: Any, training: Any) -> None:
        encoder = Encoder(tokenizer, training, training.completion_only_loss)
        self.rows = list(itertools.islice(rows, CHECKED))
        self.tokens = [encoder.encode(row) for row in self.rows]
        self.kept = kept_of(training)
        lengths = [len(ids) for ids, _ in self.tokens]
        cut = [len(ids) - len(ids[self.kept]) for ids, _ in self.tokens]
        self.is_cut = any(cut)
        lost = f"{sum(map(bool, cut))} of them lose {sum(cut):,} to --max_length {training.max_length}"
        total = f"the first {len(self.rows)} rows have {sum(lengths):,} tokens, at most {max(lengths):,}"
        self.lengths = f"{total}; {lost if self.is_cut else 'none of them is cut'}"


def kept_of(training: Any) -> slice:
    """Return the tokens that TRL keeps of a row: all of them, or the first or last `max_length`."""
    most, splits = training.max_length, training.packing and training.packing_strategy != "bfd"
    if most is None or splits:
        return slice(None)
    return slice(-most, None) if training.truncation_mode == "keep_end" and not training.packing else slice(most)


def marked(tokenizer: Any, ids: Sequence[int], labels: Sequence[int], is_coloured: bool) -> Text:
    """Write tokens with a mark of those that are learned: colours, or brackets."""
    half, text = MOST_TOKENS // 2, Text()
    if len(ids) > MOST_TOKENS:
        text.append_text(marked(tokenizer, ids[:half], labels[:half], is_coloured))
        text.append(f" [... {len(ids) - 2 * half:,} tokens ...] ")
        return text.append_text(marked(tokenizer, ids[-half:], labels[-half:], is_coloured))
    for is_learned, run in itertools.groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != -100):
        plain = visible(tokenizer.decode([int(i) for i, _ in run], clean_up_tokenization_spaces=False))
        if is_coloured:
            text.append(plain, style="green" if is_learned else "dim")
        else:
            # Brackets of the data's own would read as marks.
            escaped = plain.replace(BEGIN, "\\u27e6").replace(END, "\\u27e7")
            text.append(f"{BEGIN}{escaped}{END}" if is_learned else escaped)
    return text


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
