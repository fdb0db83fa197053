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
    encoder = Encoder(tokenizer, training, training.completion_only_loss)
    first = list(itertools.islice(rows, CHECKED))
    tokens = [encoder.encode(row) for row in first]
    most, splits = training.max_length, training.packing and training.packing_strategy != "bfd"
    keeps_end = training.truncation_mode == "keep_end" and not training.packing
    kept = slice(None) if most is None or splits else slice(-most, None) if keeps_end else slice(most)
    for number, (row, (ids, labels)) in enumerate(zip(first[:count], tokens, strict=False)):
        console.print(Text(visible(place_of(row, rows, number)), style="bold cyan"), soft_wrap=True)
        console.print(marked(tokenizer, ids[kept], labels[kept], console.color_system is not None), soft_wrap=True)
        console.print()
    lengths = [len(ids) for ids, _ in tokens]
    cut = [len(ids) - len(ids[kept]) for ids, _ in tokens]
    lost = (
        f"{sum(map(bool, cut))} of them lose {sum(cut):,} to --max_length {most}" if any(cut) else "none of them is cut"
    )
    total = f"the first {len(first)} rows have {sum(lengths):,} tokens, at most {max(lengths):,}"
    console.print(f"{total}; {lost}", soft_wrap=True, highlight=False)


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
