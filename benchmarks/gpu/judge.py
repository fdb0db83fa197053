"""What a row of a report says beside the others: whether losses agree, and which targets it meets or misses.

A target is judged where its row and the one it is measured against are both there; what was not measured has no word.
"""

import math
from typing import Any

from rows import JUDGED, LOSS_TOLERANCE

Row = dict[str, Any]
#: Contenders that keep everything on the device: the faster one counts.
ON_DEVICE = ("plain", "penstock-device")
#: What rows have in common that are held against each other.
SAME = ("memory_gb", "batch", "sequence")
LEAST_TOKENS = 16_000  # of a step: below, an update has little to hide behind
#: Contender, the ones it is measured against, how much as fast it has to be; the third of clipped steps of many tokens.
SPEEDS = (
    ("penstock-optimizer-cpu", ON_DEVICE, 0.95, "of the tokens/s of training that is not offloaded"),
    ("penstock-all-cpu", ON_DEVICE, 0.85, "of the tokens/s of training that is not offloaded"),
    ("penstock-optimizer-cpu", ("deepspeed-zero-offload",), 2.5, "times DeepSpeed's tokens/s"),
    ("penstock-all-cpu", ("deepspeed-zero3-offload",), 2.5, "times DeepSpeed's tokens/s"),
    ("penstock-auto", ("penstock-first-fit",), 1.1, "times the tokens/s of the placement page's first row that fits"),
)
#: Of `residency.py`: moves of whole states, as a share of the bandwidth of copies of pinned memory.
MOVES = ("offload to cpu / copy down", "reload from cpu / copy up")
LEAST_OF_COPIES = 0.90


def judge(rows: list[Row], *, clipped: bool) -> None:
    """Fill in what rows say beside each other, in place. Rows that came before are judged again."""
    for row in rows:
        row |= dict.fromkeys(JUDGED) | {"targets": []}
        beside = [other for other in rows if _measured(other) and all(other.get(k) == row.get(k) for k in SAME)]
        if _measured(row) and "losses" in row:
            _compare_losses(row, beside[0])
            row["targets"] = list(_speeds(row, beside, clipped))
        elif row.get("report"):
            row["targets"] = list(_moves(row["report"]))


def losses_in_short(row: Row) -> str:
    """The first and the last one."""
    return " .. ".join(
        "not finite" if loss is None else f"{loss:.4f}" for loss in (row["losses"][0], row["losses"][-1])
    )


def _measured(row: Row) -> bool:
    return row["status"] == "measured"


def _compare_losses(row: Row, first: Row) -> None:
    if row is first or not row["losses"] or not first["losses"]:
        return
    pairs = zip(row["losses"], first["losses"], strict=False)  # one of them may have been ended early
    apart = max(math.inf if None in pair else abs(pair[0] - pair[1]) for pair in pairs)  # null: it was not finite
    row |= {"losses_beside": first["name"], "losses_apart": apart, "differs": apart > LOSS_TOLERANCE}


def _speeds(row: Row, beside: list[Row], clipped: bool) -> list[dict[str, Any]]:
    found, tokens = [], row["batch"] * row["sequence"]
    for name, others, least, what in SPEEDS:
        against = [other["tokens_per_second"] for other in beside if other["name"] in others]
        counts = others != ON_DEVICE or (tokens >= LEAST_TOKENS and clipped)
        if row["name"] == name and against and counts:
            found.append(_target(f">= {least:g} {what}", row["tokens_per_second"] / max(against), least))
    return found


def _moves(report: Row) -> list[dict[str, Any]]:
    ratios = report.get("bandwidth_ratios", {}) if report["machine"]["accelerator"] else {}
    what = f">= {LEAST_OF_COPIES:g} of the bandwidth of pinned copies"
    return [_target(f"{name}: {what}", ratios[name], LEAST_OF_COPIES) for name in MOVES if name in ratios]


def _target(what: str, measured: float, least: float) -> dict[str, Any]:
    return {"target": what, "measured": measured, "met": measured >= least}
