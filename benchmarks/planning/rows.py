"""Rows of predicted and measured times, and what they come to."""

import statistics
from typing import Any


def row(case: str, predicted_s: float, measured_s: float, **others: Any) -> dict[str, Any]:
    """A row; printed as well."""
    found = {"case": case, "predicted_s": predicted_s, "measured_s": measured_s, "ratio": predicted_s / measured_s}
    print(f"{case:<44} {predicted_s:9.5f} s  {measured_s:9.5f} s  {found['ratio']:.3f}", flush=True)
    return found | others


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the rows are: at the median, and at worst."""
    off = [abs(each["ratio"] - 1) for each in rows]
    return {"rows": rows, "median_off": statistics.median(off), "worst_off": max(off)}
