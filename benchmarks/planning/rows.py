"""Rows of predicted and measured times, and what they come to."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

from penstock.planner import residuals


def row(case: str, predicted_s: float, measured_s: float, **others: Any) -> dict[str, Any]:
    """A row; printed as well."""
    found = {"case": case, "predicted_s": predicted_s, "measured_s": measured_s, "ratio": predicted_s / measured_s}
    print(f"{case:<44} {predicted_s:9.5f} s  {measured_s:9.5f} s  {found['ratio']:.3f}", flush=True)
    return found | others


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the rows are: at the median, and at worst."""
    off = [abs(each["ratio"] - 1) for each in rows]
    return {"rows": rows, "median_off": statistics.median(off), "worst_off": max(off)}


def remember(rows: Iterable[dict[str, Any]], device: str) -> None:
    """Add rows to the planner's residuals, in place of earlier ones of the same cases.

    Arguments:
        rows: of a probed machine, of a run by the clock.
        device: "cpu", "accelerator" or "simulated".
    """
    found = {each["case"]: each for each in json.loads(residuals.FILE.read_text())["rows"]}
    for each in rows:
        seconds = {key: round(each[key], 5) for key in ("predicted_s", "measured_s")}
        kind = {"device": device, "on_files": "files" in each["case"], "probed": device != "simulated"}
        found[each["case"]] = {"case": each["case"], **kind, **seconds}
    lines = ",\n".join(json.dumps(each) for each in found.values())
    residuals.FILE.write_text(f'{{"rows": [\n{lines}\n]}}\n')
