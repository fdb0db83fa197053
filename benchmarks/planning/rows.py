"""Rows of predicted and measured times, and what they come to."""

import json
import statistics
from collections.abc import Iterable
from typing import Any

from penstock.planner.make_plan import RESIDUALS

KEPT = 3


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
    """Add rows to the planner's residuals, which keep the last three of a case.

    Arguments:
        rows: of a probed machine, of a run by the clock.
        device: "cpu", "accelerator" or "simulated".
    """
    known = json.loads(RESIDUALS.read_text())["rows"]
    for each in rows:
        seconds = {key: round(each[key], 5) for key in ("predicted_s", "measured_s")}
        kind = {"device": device, "on_files": "files" in each["case"], "probed": device != "simulated"}
        same = [number for number, other in enumerate(known) if other["case"] == each["case"]]
        for number in reversed(same[: len(same) - KEPT + 1]):
            del known[number]
        known.append({"case": each["case"], **kind, **seconds})
    lines = ",\n".join(json.dumps(each) for each in known)
    RESIDUALS.write_text(f'{{"rows": [\n{lines}\n]}}\n')
