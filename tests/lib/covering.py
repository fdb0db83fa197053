"""Rows in which all pairs of choices meet, and all triples of the risky ones: what a full product tests, in few rows.

Most faults of configurations show where two choices meet, nearly all others where three do (Kuhn, Wallace and Gallo,
"Software fault interactions and implications for software testing", 2004).
"""

import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = Mapping[str, Any]
MOST_IN_VAIN = 1000  # draws in which no row fits


def covering(
    choices: Mapping[str, Sequence[Hashable]],
    *,
    risky: Collection[str] = (),
    fits: Callable[[Row], bool] = lambda row: True,
    first: Sequence[Row] = (),
    draws: int = 60,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Choose rows: greedily, each time the one of some random rows in which most of what has not met yet meets.

    Arguments:
        choices: by feature its values, which can be hashed.
        risky: features of which every three values meet that may.
        fits: whether a row may be; asked of parts of rows, too, which have some of the features.
        first: rows that are taken before any is drawn.
        draws: how many rows are drawn for each that is taken.

    Returns:
        Rows with a value of every feature; the same for the same arguments.
    """
    chance = random.Random(seed)
    groups = [*combinations(choices, 2), *combinations([name for name in choices if name in risky], 3)]
    parts = ((names, values) for names in groups for values in product(*map(choices.get, names)))
    # A dict: sets have no order.
    left = dict.fromkeys(part for part in parts if fits(dict(zip(*part, strict=True))))
    taken: list[dict[str, Any]] = []

    def parts_of(row: Row) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
        return ((names, tuple(row[name] for name in names)) for names in groups)

    def take(row: Row) -> None:
        taken.append({name: row[name] for name in choices})
        for part in parts_of(row):
            left.pop(part, None)

    for row in first:
        take(row)
    in_vain = 0
    while left:
        wanted = dict(zip(*next(iter(left)), strict=True))
        drawn = [{name: chance.choice(values) for name, values in choices.items()} | wanted for _ in range(draws)]
        fitting = [row for row in drawn if fits(row)]
        in_vain = 0 if fitting else in_vain + 1
        if in_vain > MOST_IN_VAIN:
            raise ValueError(f"{wanted} fits, and no row with it does: let `fits` refuse it")
        if fitting:  # else others are drawn
            take(max(fitting, key=lambda row: sum(part in left for part in parts_of(row))))
    return taken


def named(row: Row, plain: Row | None = None) -> str:
    """A row's id: its values, without those that are as in `plain`."""
    values = [value for name, value in row.items() if plain is None or value != plain[name]]
    return " ".join(str(getattr(value, "__name__", value)) for value in values) or "plain"
