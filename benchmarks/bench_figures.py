"""A report of `bench.py`: its form, and how the reports of the single benchmarks become figures of that form.

A figure is one number per round, of one contender of one part. Where somebody else does the same in the same round it
has ratios too, round by round: those are what runs are compared by, since a noisy hour disturbs both sides alike.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORM = 1
#: What a report holds, and of what type each is.
KEYS: dict[str, type] = {
    "form": int,
    "date": str,
    "quick": bool,
    "machine": dict,
    "versions": dict,
    "settings": dict,
    "load": dict,
    "seconds": dict,
    "figures": list,
    "left_out": dict,
}


@dataclass(frozen=True)
class Figure:
    """Numbers of a contender.

    Attributes:
        part: the benchmark they are of.
        name: the contender, and what was measured where that is not time.
        unit: of the numbers.
        rounds: one number of each round.
        base: who is measured in the same rounds; empty for nobody.
        ratios: the number over that of `base`, round by round.
        more_is_better: whether large numbers are good ones.
    """

    part: str
    name: str
    unit: str
    rounds: list[float]
    base: str = ""
    ratios: list[float] | None = None
    more_is_better: bool = False

    @property
    def key(self) -> str:
        """What the figure is called in every run."""
        return f"{self.part}: {self.name}" + (f" / {self.base}" if self.base else "")

    @property
    def compared(self) -> list[float]:
        """The numbers that runs are compared by."""
        return self.rounds if self.ratios is None else self.ratios


def figures_of(report: Mapping[str, Any]) -> list[Figure]:
    """The figures of a report."""
    return [Figure(**entry) for entry in report["figures"]]


def as_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """The figures as a report holds them."""
    return [asdict(figure) for figure in figures]


def read_report(path: Path) -> dict[str, Any]:
    """Read a stored report.

    Raises:
        ValueError: the file is not a report of this form.
    """
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("form") != FORM:
        raise ValueError(f"{path} is not a report of form {FORM}: run the benchmarks again and store them.")
    wrong = [key for key, kind in KEYS.items() if not isinstance(report.get(key), kind)]
    if wrong:
        raise ValueError(f"{path} lacks {', '.join(wrong)}, or has something else there.")
    figures_of(report)
    return report


# How each benchmark's own report is read. All are functions of it and of the part's name.


def of_turns(
    part: str, rounds: Mapping[str, list[dict[str, float]]], base: str, keys: Mapping[str, str]
) -> list[Figure]:
    """Of contenders that took turns: figures by the key that the contenders gave them, each with its unit."""
    found = []
    for name, figures in rounds.items():
        for key, unit in keys.items():
            numbers = [row[key] for row in figures if key in row]
            if not numbers or not any(numbers):
                continue
            others = [row.get(key, 0.0) for row in rounds.get(base, [])]
            paired = name != base and len(others) == len(numbers) and all(others)
            ratios = [a / b for a, b in zip(numbers, others, strict=True)] if paired else None
            label = name if key in ("total_ms", "seconds") else f"{name}, {key}"
            found.append(Figure(part, label, unit, numbers, base if paired else "", ratios))
    return found


def of_step(part: str, report: Mapping[str, Any], base: str = "plain") -> list[Figure]:
    """Of `step.py`: time and peak memory."""
    return of_turns(part, report["rounds"], base, {"total_ms": "ms", "peak_gib": "GiB"})


def of_small(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `small.py`: milliseconds of a layer, by how many there are."""
    found = []
    for layers, rounds in report["rounds"].items():
        found += of_turns(f"{part}, {layers} layers", rounds, "plain", {"total_ms": "ms a layer"})
    return found


def of_rules(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `rules.py`: nanoseconds of a parameter, over what memory allows."""
    found = []
    for run in report["runs"]:
        label = f"{part}, {run['numel'] / 1e6:.0f}M, {run['threads']} threads"
        for name, row in run["rows"].items():
            seconds, bound = row["rounds"]["seconds"], row["rounds"]["bound_seconds"]
            ratios = [a / b for a, b in zip(seconds, bound, strict=True)]
            found.append(
                Figure(label, name, "ns a parameter", [s / run["numel"] * 1e9 for s in seconds], "bound", ratios)
            )
    return found


def of_disk(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `io.py`: bandwidths, over the best that fio had in that round."""
    found = []
    for pattern, row in report["rounds"].items():
        speeds = {name: [entry["gb_per_second"] for entry in entries] for name, entries in row.items()}
        best = [max(at) for at in zip(*(s for name, s in speeds.items() if name.startswith("fio")), strict=True)]
        for name, numbers in speeds.items():
            if not name.startswith("fio"):
                ratios = [a / b for a, b in zip(numbers, best, strict=True)]
                found.append(
                    Figure(f"{part}, {pattern}", name, "GB/s", numbers, "best of fio", ratios, more_is_better=True)
                )
    return found


def of_checkpoint(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `checkpoint.py`: seconds, over those of the bare disk."""
    found = []
    for verb in ("save", "load"):
        rounds = {
            name.removeprefix(f"{verb} "): [{"seconds": seconds} for seconds, _ in pairs]
            for name, pairs in report["rounds"].items()
            if name.startswith(f"{verb} ")
        }
        found += of_turns(f"{part}, {verb}", rounds, "disk", {"seconds": "s"})
    return found


def of_moves(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `residency.py`: milliseconds, over those of plain copies of the same bytes."""
    bases = {
        "offload to cpu": "copy down",
        "reload from cpu": "copy up",
        "offload to nvme": "write",
        "reload from nvme": "read",
    }
    found = []
    for name, base in bases.items():
        if name in report["rounds"]:
            rounds = {who: [{"total_ms": ms} for ms in report["rounds"][who]] for who in (name, base)}
            found += of_turns(part, rounds, base, {"total_ms": "ms"})
    return found


def of_start(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `start.py`: seconds of new processes, over those of Python alone or of `import torch`."""
    found = []
    for name, figures in report["rounds"].items():
        base = "import torch" if "over torch" in name else "python"
        found += of_turns(part, {name: figures, base: report["rounds"][base]}, base, {"seconds": "s"})[:1]
    return found


def of_prepare(part: str, report: Mapping[str, Any]) -> list[Figure]:
    """Of `prepare.py`: seconds, over those of the bare disk; and memory that comes and goes."""
    return of_turns(part, report["rounds"], "disk", {"seconds": "s", "passing_units": "units"})


Reader = Callable[[str, Mapping[str, Any]], list[Figure]]


def missing(report: Mapping[str, Any], asked: Iterable[str]) -> list[str]:
    """Contenders that were asked for and have no rounds."""
    rounds = report.get("rounds", {})
    levels = list(rounds.values()) if rounds and all(isinstance(at, dict) for at in rounds.values()) else [rounds]
    return [name for name in asked if any(name not in level for level in levels)]


def median(numbers: list[float]) -> float:
    """The middle one."""
    return statistics.median(numbers)
