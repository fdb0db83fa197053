"""Past predictions against runs: how far a step's prediction may be off.

`residuals.json` has a row for each step that was predicted and then measured; `benchmarks/plan.py` adds rows.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, stdev

FILE = Path(__file__).with_name("residuals.json")
_LEAST_ROWS = 3
#: The part of normal ratios below the high end, and above the low end. For nine in ten between them 0.95 would do; past
#: ratios have longer tails, and with 0.97 nine in ten of them lie in the range of the others.
_INSIDE = 0.97


@dataclass(frozen=True)
class Residual:
    """A step that was predicted, then measured.

    Attributes:
        case: the model and where its state was.
        device: "cpu", "accelerator", or "simulated" for streams that sleep.
        on_files: whether state was in files.
        probed: whether the machine's rates were measured on it, and not taken from a data sheet.
        predicted_s: seconds of a step by the plan.
        measured_s: seconds of a step of the run.
    """

    case: str
    device: str
    on_files: bool
    probed: bool
    predicted_s: float
    measured_s: float


def stored() -> tuple[Residual, ...]:
    """Read the rows that come with the package."""
    return tuple(Residual(**row) for row in json.loads(FILE.read_text())["rows"])


def step_range(
    step_s: float, *, device: str, on_files: bool, probed: bool, rows: Iterable[Residual] | None = None
) -> tuple[float, float]:
    """Return the range that holds the measured step nine times in ten, by past steps of its class.

    The logarithms of measured / predicted are taken as normal, so that the next one lies within
    mean +- t * deviation * sqrt(1 + 1/n), with Student's t of n - 1: few rows give a wide range. A class of fewer than
    three rows takes those of the other storage too, then those of every device.

    Arguments:
        step_s: the predicted seconds of a step.
        device: the type of the device: "cpu", or an accelerator's.
        on_files: whether state is in files.
        probed: whether the machine's rates were measured on it.
        rows: past steps; `None` for those that come with the package.

    Returns:
        The low and the high end, which hold `step_s` too.

    Example:
        >>> low, high = step_range(1.0, device="cuda", on_files=False, probed=False)
        >>> low <= 1.0 < high
        True
    """
    kind = device if device in ("cpu", "simulated") else "accelerator"
    known = stored() if rows is None else tuple(rows)
    of_figures = [row for row in known if row.probed is probed and row.device != "simulated"]
    of_device = [row for row in known if row.probed is probed and row.device == kind]
    of_class = [row for row in of_device if row.on_files is on_files]
    chosen = next((each for each in (of_class, of_device, of_figures) if len(each) >= _LEAST_ROWS), known)
    low, high = _factors([log(row.measured_s / row.predicted_s) for row in chosen])
    return min(low, 1.0) * step_s, max(high, 1.0) * step_s


def _factors(logs: Sequence[float]) -> tuple[float, float]:
    """Return the factors between which the next measured / predicted lies."""
    free = len(logs) - 1
    z = NormalDist().inv_cdf(_INSIDE)
    # Student's t by its expansion in 1/free (Abramowitz and Stegun, 26.7.5): some percent too low at two.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    spread = t * stdev(logs) * sqrt(1 + 1 / len(logs))
    return exp(fmean(logs) - spread), exp(fmean(logs) + spread)
