"""Charts that are no curves: the timeline of a step, where every byte was, a plan held against what was measured."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from penstock.cli.reporting.chart import Chart, Table, unit_of
from penstock.cli.reporting.markup import label
from penstock.cli.reporting.run import MOST_NUMBER, TIERS, Run
from penstock.cli.reporting.timeline import Piece, Timeline, joined
from penstock.cli.training.reporting.formats import format_bytes
from penstock.ext.observe.timeline import RESOURCES, WAITING

#: Rows of the table of units, at most.
MOST_UNITS = 300
#: By how much a measured figure may differ from a planned one without being named.
TOLERANCE = 0.15
_ROW_TONES = {
    "compute": 0,
    "upload": 5,
    "download": 4,
    "collective": 6,
    "model collective": 6,
    "update": 2,
    "device update": 2,
    "read": 1,
    "fetch": 1,
    "write": 1,
    "save": 7,
    WAITING: 3,
}
_KIND_TONES = {"param": 0, "grad": 1, "master": 2, "gathered": 5, "staging": 7, "activation": 6, "leaving": 3}
_OTHER_TONES = (4, 6)
#: Kinds that a plan does not count as state at rest.
_NOT_AT_REST = ("gathered", "staging", "leaving", "activation")
_HALF_BAR = 0.4


def timeline_chart(run: Run, name: str, number: int) -> Chart | None:
    """Draw what each resource did in one step, and what compute waited for."""
    found = run.timeline
    if found is None:
        return None
    scale, unit = (1e3, "ms") if found.seconds < 10 else (1.0, "s")
    drawn = {row: joined(pieces, found.seconds) for row, pieces in found.rows.items()}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row,
            "y": [row] * len(pieces),
            "base": [piece.start * scale for piece in pieces],
            "x": [(piece.stop - piece.start) * scale for piece in pieces],
            "text": [_about_piece(piece, scale, unit) for piece in pieces],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "tone": _ROW_TONES[row],
            "width": 2 * _HALF_BAR,
        }
        for row, pieces in drawn.items()
    ]
    waited = sum(found.waits.values())
    causes = ", ".join(f"{row} {seconds / found.seconds:.0%}" for row, seconds in list(found.waits.items())[:4])
    notes = [
        f"{found.seconds * scale:,.1f} {unit}, bound by {found.bound_by}. Compute waited "
        f"{min(1.0, waited / found.seconds):.0%} of it{f' ({causes})' if causes else ''}."
    ]
    pieces_count, drawn_count = (sum(map(len, rows.values())) for rows in (found.rows, drawn))
    if drawn_count < pieces_count:
        notes.append(f"{pieces_count:,} pieces of work are drawn as {drawn_count:,}: those next to each other as one.")
    if found.steps == 1:
        notes.append("The trace has one step: what it found under way when it began is not in it.")
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": unit}, "range": [0, found.seconds * scale]},
        "yaxis": {"categoryorder": "array", "categoryarray": list(drawn)[::-1], "fixedrange": True, "automargin": True},
        "hovermode": "closest",
        "showlegend": False,
    }
    height = 110 + 34 * len(drawn)
    return Chart(f"timeline-{number}", f"One step{name}", traces, _uses(found), layout, notes, True, height)


def placement_chart(run: Run, name: str, which: int) -> Chart | None:
    """Draw the bytes of each kind on each tier."""
    found = bytes_by_kind(run)
    if not found:
        return None
    tiers = [tier for tier in TIERS if any(tier in by_tier for by_tier in found.values())]
    totals = [sum(by_tier.get(tier, 0) for by_tier in found.values()) for tier in tiers]
    unit, size = unit_of(max(totals))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(kind),
            "y": [label(tier) for tier in tiers],
            "x": [by_tier.get(tier, 0) / size for tier in tiers],
            "text": [f"{label(kind)}: {format_bytes(int(by_tier.get(tier, 0)))}" for tier in tiers],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "tone": _KIND_TONES.get(kind, _OTHER_TONES[number % len(_OTHER_TONES)]),
        }
        for number, (kind, by_tier) in enumerate(found.items())
    ]
    rows = [
        [kind, *(format_bytes(int(by_tier[tier])) if tier in by_tier else "" for tier in tiers)]
        for kind, by_tier in found.items()
    ]
    rows.append(["all", *(format_bytes(int(total)) for total in totals)])
    layout = {
        "barmode": "stack",
        "xaxis": {"ticksuffix": f" {unit}"},
        "yaxis": {"categoryorder": "array", "categoryarray": tiers[::-1], "fixedrange": True, "automargin": True},
        "hovermode": "closest",
        "showlegend": True,
    }
    notes = [f"After step {run.placement_step:,}{', on rank 0 alone' if run.world_size > 1 else ''}."]
    table = Table(["kind", *tiers], rows)
    return Chart(f"placement-{which}", f"Where every byte was{name}", traces, table, layout, notes, True, 260)


def bytes_by_kind(run: Run) -> dict[str, dict[str, float]]:
    """Add up where every byte was, by kind and tier."""
    found: dict[str, dict[str, float]] = {}
    for row in run.placement:
        by_tier = found.setdefault(str(row.get("kind", ""))[:80], {})
        tier = str(row.get("tier", ""))
        if tier in TIERS:
            by_tier[tier] = by_tier.get(tier, 0) + row["nbytes"]
    return {kind: by_tier for kind, by_tier in found.items() if by_tier}


def units_table(run: Run) -> Table:
    """List where every byte was, a row for each kind of a unit on a tier."""
    keys = ("unit", "kind", "tier", "dtype")
    rows = [
        [
            *(str(row.get(key, "")) for key in keys),
            "yes" if row.get("pinned") is True else "",
            f"{int(row['nbytes']):,}",
        ]
        for row in run.placement[:MOST_UNITS]
    ]
    left = len(run.placement) - len(rows)
    return Table([*keys, "pinned", "bytes"], rows, f"{left:,} more rows are in metrics.jsonl." if left else "")


def plan_chart(run: Run, name: str, number: int) -> Chart | None:
    """Hold what a plan predicts against what was measured."""
    predicted = _times(run.plan)
    if not predicted or run.plan is None:
        return None
    measured = _measured(run)
    names = [each for each in dict.fromkeys((*predicted, *measured)) if each in predicted or measured[each] > 0]
    traces = [
        {
            "type": "bar",
            "name": said,
            "x": [label(each) for each in names],
            "y": [times.get(each, 0.0) for each in names],
            "tone": tone,
        }
        for said, times, tone in (("planned", predicted, 7), ("measured", measured, 0))
        if times
    ]
    rows: list[list[object]] = [_compared(each, predicted.get(each), measured.get(each), _seconds) for each in names]
    rows += [_compared(*row, lambda size: format_bytes(int(size))) for row in _sizes(run, run.plan)]
    off = [row[0] for row in rows if str(row[3]).endswith("!")]
    notes = ["Seconds of a step, and of each resource in it."]
    notes += [f"More than {TOLERANCE:.0%} off: {', '.join(map(str, off))}."] if off else []
    notes += [] if measured else ["No step was traced, so nothing was measured."]
    layout = {"barmode": "group", "yaxis": {"ticksuffix": " s"}, "showlegend": True, "hovermode": "x unified"}
    table = Table(["", "planned", "measured", "off by"], rows)
    return Chart(f"plan-{number}", f"Plan against measured{name}", traces, table, layout, notes, True, 340)


def _times(plan: Mapping[str, Any] | None) -> dict[str, float]:
    """List the seconds of a step, and those in which each resource works, as a plan has them."""
    busy = plan.get("busy_s") if plan else None
    times = {"step": plan.get("step_s") if plan else None, **(busy if isinstance(busy, dict) else {})}
    return {name: float(value) for name, value in times.items() if _is_size(value)}


def _measured(run: Run) -> dict[str, float]:
    """List the same as they were: of steps by their lines where those say it, of resources by the trace."""
    if run.timeline is None:
        return {}
    seconds = [f["step_seconds"] for f in run.figures.values() if "step_seconds" in f and "traced" not in f]
    return {"step": median(seconds[1:] or seconds or [run.timeline.seconds]), **run.timeline.busy_seconds}


def _sizes(run: Run, plan: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """List the bytes at rest and the most on each tier, planned and measured."""
    sizes = (plan.get(key) for key in ("bytes", "peak_bytes"))
    rests, peaks = ({t: v for t, v in (of.items() if isinstance(of, dict) else ()) if _is_size(v)} for of in sizes)
    kinds = bytes_by_kind(run)
    rows: list[tuple[str, float | None, float | None]] = []
    for tier in TIERS:
        if rests.get(tier):
            rest = sum(by_tier.get(tier, 0) for kind, by_tier in kinds.items() if kind not in _NOT_AT_REST)
            rows.append((f"at rest on {tier}", rests[tier], rest if kinds else None))
    rows += [(f"most on {tier}", peaks[tier], None) for tier in TIERS if peaks.get(tier)]
    return rows


def _compared(name: str, planned: float | None, measured: float | None, written: Any) -> list[object]:
    both = planned is not None and measured is not None and planned > 0
    change = measured / planned - 1 if both else 0.0  # type: ignore[operator]
    texts = ["" if value is None else written(value) for value in (planned, measured)]
    return [name, *texts, f"{change:+.0%}{' !' if abs(change) > TOLERANCE else ''}" if both else ""]


def _seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_NUMBER


def _about_piece(piece: Piece, scale: float, unit: str) -> str:
    size = f", {format_bytes(piece.nbytes)}" if piece.nbytes else ""
    more = f" and {piece.count - 1:,} more" if piece.count > 1 else ""
    return f"{label(piece.name)}{more}: {(piece.stop - piece.start) * scale:,.3f} {unit}{size}"


def _uses(found: Timeline) -> Table:
    """List how each row was used, as a trace's own table does."""
    rows: list[list[object]] = []
    for row, pieces in found.rows.items():
        busy: float = sum(piece.stop - piece.start for piece in pieces)
        nbytes, waited = sum(piece.nbytes for piece in pieces), found.waits.get(row, 0.0)
        speed = f"{nbytes / busy / 1e9:.2f} GB/s" if nbytes and busy else ""
        size = format_bytes(nbytes) if nbytes else ""
        said = "what compute waited for" if row == WAITING else RESOURCES[row]
        share, of_waits = f"{busy / found.seconds:.0%}", f"{waited / found.seconds:.0%}" if waited else ""
        rows.append([row, said, share, _seconds(busy), of_waits, f"{len(pieces):,}", size, speed])
    causes: defaultdict[str, float] = defaultdict(float)
    for piece in found.rows.get(WAITING, ()):
        causes[piece.name] += piece.stop - piece.start
    longest = sorted(causes.items(), key=lambda item: -item[1])[:10]
    rows += [
        [name, "", f"{seconds / found.seconds:.0%}", _seconds(seconds), "", "", "", ""] for name, seconds in longest
    ]
    return Table(["row", "resource", "busy", "for", "waited for", "pieces", "bytes", "speed"], rows)
