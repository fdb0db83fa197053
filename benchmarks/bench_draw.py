"""Draw a report of `bench.py`: a bar for every figure that somebody was measured beside, as SVG.

python benchmarks/bench_draw.py RUN.json docs/bench.svg

A bar is the median of the ratios, on a logarithmic axis from 1; the line over it spans the middle half of the rounds.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench_figures import Figure, figures_of, read_report

WIDTH, LEFT, ROW, TOP = 900, 470, 18, 40
COLOURS = {True: "#5f8d4e", False: "#d1495b"}


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """The range of the middle half."""
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return first, third


def draw(figures: Sequence[Figure]) -> str:
    """The drawing; figures without ratios are left out."""
    shown = [(figure, figure.ratios) for figure in figures if figure.ratios and min(figure.ratios) > 0]
    most = max([2.0, *(max(r, 1 / r) for _, ratios in shown for r in quartiles(ratios))])
    half = (WIDTH - LEFT - 90) / 2
    middle, height = LEFT + half, TOP + ROW * (len(shown) + 1)

    def place(ratio: float) -> float:
        return middle + math.log(ratio) / math.log(most) * half

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{middle - 4}" y="18" text-anchor="end">less than who it is measured beside</text>',
        f'<text x="{middle + 4}" y="18">more</text>',
        f'<path d="M{middle},{TOP - 14} V{height - ROW}" stroke="#888888"/>',
    ]
    for number, (figure, ratios) in enumerate(shown):
        y, ratio = TOP + ROW * number, statistics.median(ratios)
        first, third = (place(r) for r in quartiles(ratios))
        start, width = min(middle, place(ratio)), abs(place(ratio) - middle)
        good = (ratio >= 1) == figure.more_is_better
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(figure.key)}</text>',
            f'<rect x="{start:.1f}" y="{y - 5}" width="{width:.1f}" height="10" fill="{COLOURS[good]}"/>',
            f'<path d="M{first:.1f},{y} H{third:.1f}" stroke="#222222"/>',
            f'<text x="{WIDTH - 60}" y="{y + 4}">{ratio:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.write_text(draw(figures_of(read_report(arguments.run))))


if __name__ == "__main__":
    main()
