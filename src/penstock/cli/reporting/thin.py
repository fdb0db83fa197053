"""As many points of a curve as a chart can show."""

from collections.abc import Sequence

#: Points of a chart, at most: more than pixels show no more, and make a page slow.
MOST_POINTS = 2000

Column = Sequence[float | None]


def kept_points(columns: Sequence[Column], most: int = MOST_POINTS) -> list[int]:
    """Choose the points of curves over the same steps that are drawn, by index, in order.

    Up to `most` are all kept. Of more, neighbours make groups of one size, and of each group every curve's least and
    greatest value stay: nothing that stands out is lost. The first and the last point stay too.

    Arguments:
        columns: the curves, of one length; `None` where there is no value.
        most: how many points there may be, of all curves together.
    """
    count = len(columns[0]) if columns else 0
    if count <= most:
        return list(range(count))
    groups = max(1, most // (2 * len(columns)))
    kept = {0, count - 1}
    for group in range(groups):
        begin, end = group * count // groups, (group + 1) * count // groups
        for column in columns:
            known = [index for index in range(begin, end) if column[index] is not None]
            if known:
                kept.add(min(known, key=lambda index: column[index] or 0.0))
                kept.add(max(known, key=lambda index: column[index] or 0.0))
    return sorted(kept)


def about_thinning(count: int, kept: int) -> str:
    """Say in a sentence that points were left out; nothing where none were."""
    if kept >= count:
        return ""
    return f"{kept:,} of {count:,} points are drawn: the least and the greatest of each group of neighbours."
