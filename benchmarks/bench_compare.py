"""Whether a run is better than a stored one, equal within the noise, or worse: figure by figure.

    python benchmarks/bench_compare.py RUN.json STORED.json

A figure is compared by its ratios to whoever was measured in the same rounds; without such, by its numbers, and only
where the machine is the same. The noise is what rounds of one run differ by: half of the range that the middle half of
them lies in, of both runs together, and `LEAST` of the number at least. Medians that are further apart differ.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_figures import Figure, figures_of, read_report

LEAST = 0.03
VERDICTS = ("better", "equal", "worse", "not compared")


@dataclass(frozen=True)
class Comparison:
    """A figure beside the stored one.

    Attributes:
        key: the figure's.
        verdict: one of `VERDICTS`.
        change: median now over median then; 0 where it is not compared.
        noise: by how much that may differ from 1 and mean nothing.
        why: of what is not compared.
    """

    key: str
    verdict: str
    change: float = 0.0
    noise: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.verdict:<13}{self.key}: {self.why}"
        return f"{self.verdict:<13}{self.key}: {self.change:.2f} of what is stored, noise {self.noise:.2f}"


def spread(numbers: list[float]) -> float:
    """Half of the range of the middle half, as a share of the median; of few rounds, half of the whole range."""
    if len(numbers) < 4:
        width = max(numbers) - min(numbers)
    else:
        first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
        width = third - first
    return width / 2 / abs(statistics.median(numbers))


def compare_figure(now: Figure, then: Figure, *, same_machine: bool) -> Comparison:
    """One figure of two runs."""
    if (now.ratios is None) != (then.ratios is None):
        return Comparison(now.key, "not compared", why="one of the runs has nobody beside it")
    if now.ratios is None and not same_machine:
        return Comparison(now.key, "not compared", why="the stored run is of another machine")
    if not statistics.median(then.compared) or not statistics.median(now.compared):
        return Comparison(now.key, "not compared", why="there is nothing to divide by")
    change = statistics.median(now.compared) / statistics.median(then.compared)
    noise = max(LEAST, spread(now.compared) + spread(then.compared))
    gain = change if now.more_is_better else 1 / change
    # Of both directions alike: half as fast is as far from equal as twice as fast.
    verdict = "better" if gain > 1 + noise else "worse" if gain < 1 / (1 + noise) else "equal"
    return Comparison(now.key, verdict, change, noise)


def compare(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Comparison]:
    """Every figure of a run, and those that the stored run has alone."""
    keys = ("processor", "cores", "accelerator")
    same_machine = all(now["machine"].get(key) == then["machine"].get(key) for key in keys)
    stored = {figure.key: figure for figure in figures_of(then)}
    found = []
    for figure in figures_of(now):
        other = stored.pop(figure.key, None)
        part = figure.part.split(",")[0]
        if other is None:
            found.append(Comparison(figure.key, "not compared", why="the stored run does not have it"))
        elif now["settings"].get(part) != then["settings"].get(part):
            found.append(Comparison(figure.key, "not compared", why="the stored run has other settings"))
        else:
            found.append(compare_figure(figure, other, same_machine=same_machine))
    asked = set(now["settings"])
    gone = [key for key, figure in stored.items() if figure.part.split(",")[0] in asked]
    return [*found, *(Comparison(key, "not compared", why="this run does not have it") for key in gone)]


def summary(comparisons: list[Comparison]) -> str:
    """How many of each verdict."""
    counts = [f"{sum(c.verdict == verdict for c in comparisons)} {verdict}" for verdict in VERDICTS]
    return ", ".join(counts)


def main() -> None:
    """Compare two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("stored", type=Path)
    arguments = parser.parse_args()
    found = compare(read_report(arguments.run), read_report(arguments.stored))
    print(*found, summary(found), sep="\n")


if __name__ == "__main__":
    main()
