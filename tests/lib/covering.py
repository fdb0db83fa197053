"""Rows in which all pairs of choices meet, and all triples of the risky ones: what a full product tests, in few rows.

Most faults of configurations show where two choices meet, nearly all others where three do (Kuhn, Wallace and Gallo,
"Software fault interactions and implications for software testing", 2004).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

Row = Mapping[str, Any]
Part = tuple[tuple[str, Any], ...]  # choices: features and their values
MOST_IN_VAIN = 100  # times that no row fits


def covering(
    choices: Mapping[str, Sequence[Hashable]],
    *,
    risky: Collection[str] = (),
    fits: Callable[[Row], bool] = lambda row: True,
    first: Sequence[Row] = (),
    draws: int = 20,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Choose rows: greedily, each time the one of some drawn rows in which most of what has not met yet meets.

    Around what has not met yet a row takes the other features in random order, each with the value that adds most.

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
    parts = (tuple(zip(names, values, strict=True)) for names in groups for values in product(*map(choices.get, names)))
    left: dict[Part, None] = dict.fromkeys(part for part in parts if fits(dict(part)))  # a dict: sets have no order
    # A bit for each choice: what a choice would add to a row is counted at once.
    every = [(name, value) for name, values in choices.items() for value in values]
    every += [(name, row[name]) for row in first for name in choices]
    bits = {choice: 1 << number for number, choice in enumerate(dict.fromkeys(every))}
    missing: dict[Part, int] = defaultdict(int)  # by part of a part that is left, what is missing to it
    taken: list[dict[str, Any]] = []

    def turn(part: Part) -> None:
        for *some, last in permutations(part):
            missing[tuple(some)] ^= bits[last]

    def take(row: Row) -> None:
        taken.append({name: row[name] for name in choices})
        for names in groups:
            part = tuple((name, row[name]) for name in names)
            if part in left:
                del left[part]
                turn(part)

    def draw(wanted: Part) -> tuple[int, dict[str, Any]] | None:
        """Draw a row, with how much meets in it; None where no value of some feature fits."""
        row, met, mask = dict(wanted), 0, sum(bits[choice] for choice in wanted)
        others = [name for name in choices if name not in row]
        for name in chance.sample(others, len(others)):
            added = {}
            for value in chance.sample(choices[name], len(choices[name])):
                some: list[Part] = [((name, value),)]
                if name in risky:
                    some += [((name, value), other) for other in row.items() if other[0] in risky]
                added[value] = sum((missing.get(each, 0) & mask).bit_count() for each in some)
            fitting = [value for value in added if fits({**row, name: value})]
            if not fitting:
                return None
            row[name] = best = max(fitting, key=added.__getitem__)
            met, mask = met + added[best], mask | bits[name, best]
        return met, row

    for part in left:
        turn(part)
    for row in first:
        take(row)
    in_vain = 0
    while left:
        wanted = next(iter(left))
        drawn = [row for row in (draw(wanted) for _ in range(draws)) if row is not None]
        in_vain = 0 if drawn else in_vain + 1
        if in_vain > MOST_IN_VAIN:
            raise ValueError(f"{dict(wanted)} fits, and no row with it does: let `fits` refuse it")
        if drawn:  # else others are drawn
            take(max(drawn, key=lambda each: each[0])[1])
    return taken


def named(row: Row, plain: Row | None = None) -> str:
    """A row's id: its values, without those that are as in `plain`."""
    values = [value for name, value in row.items() if plain is None or value != plain[name]]
    return " ".join(str(getattr(value, "__name__", value)) for value in values) or "plain"
