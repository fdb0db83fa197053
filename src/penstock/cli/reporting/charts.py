"""Charts of a run, or of two side by side: what plotly draws, and the table of the same."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

from penstock.cli.reporting.markup import label
from penstock.cli.reporting.run import MOST_NUMBER, TIERS, Run
from penstock.cli.reporting.timeline import Piece, Timeline, joined
from penstock.ext.observe.timeline import RESOURCES, WAITING
from penstock.planner.formatting import byte_unit, digits, seconds, share, size

#: Points of a curve, at most: more than pixels show no more, and make a page slow.
MOST_POINTS = 2000
#: Rows of the table below a chart, and charts of figures with names of the user's own, at most.
_MOST_ROWS, _MOST_OWN = 100, 12
#: By how much a measured figure may differ from a planned one without being named.
TOLERANCE = 0.15
#: Few steps have their points drawn: one alone would be no line.
_FEW = 40
_TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm, before clipping",
    "tokens_per_second": "Tokens a second",
    "loss_scale": "Loss scale",
    "mfu": "Model FLOPs utilisation",
}
_FROM_ZERO = ("lr", "tokens_per_second", "mfu")
_FORMATS = {"lr": ".2~e", "mfu": ".1%"}
_DASHES = ("solid", "dot", "dash", "dashdot")
_TONES = {
    **{"device": 0, "cpu": 2, "nvme": 1},
    **{"param": 0, "grad": 1, "master": 2, "gathered": 5, "staging": 7, "activation": 6, "leaving": 3},
    **{"compute": 0, "upload": 5, "download": 4, "collective": 6, "model collective": 6, "update": 2},
    **{"device update": 2, "read": 1, "fetch": 1, "write": 7, "save": 7, WAITING: 3},
}
#: Kinds that a plan does not count as state at rest.
_NOT_AT_REST = ("gathered", "staging", "leaving", "activation")

Points = Mapping[int, float]


@dataclass(frozen=True)
class Table:
    """Rows of texts under heads; the first column names the row."""

    heads: Sequence[object]
    rows: Sequence[Sequence[object]]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
        id: its name in the page.
        title: what it shows.
        traces: plotly's, with the number of a colour of the page as `tone`. Names and texts are plain.
        layout: plotly's, over the page's own.
        notes: sentences below the title.
        given: the table of the same, for readers who cannot see it; `None` for the points of the traces.
        height: in pixels.
    """

    id: str
    title: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    given: Table | None = None
    height: int = 300

    @property
    def is_wide(self) -> bool:
        """True if it takes the whole width."""
        return bool(self.traces[0]["type"] == "bar")

    @property
    def table(self) -> Table:
        """The table of the same."""
        if self.given is not None:
            return self.given
        is_flat = self.traces[0].get("orientation") == "h"
        keys, values = ("y", "x") if is_flat else ("x", "y")
        axis = self.layout.get(f"{values}axis", {})
        columns = [dict(zip(trace[keys], trace[values], strict=True)) for trace in self.traces]
        found = list(dict.fromkeys(key for column in columns for key in column))
        found = found if is_flat else sorted(found)
        shown = found[:: -(-len(found) // _MOST_ROWS)] if found else []
        written = "{:.1%}" if axis.get("tickformat", "").endswith("%") else f"{{:.6g}}{axis.get('ticksuffix', '')}"
        rows = [[key, *(written.format(c[key]) if key in c else "" for c in columns)] for key in shown]
        note = f"{len(shown):,} of {len(found):,} rows." if len(shown) < len(found) else ""
        return Table(["" if is_flat else "step", *(trace["name"] for trace in self.traces)], rows, note)

    def to_dict(self) -> dict[str, Any]:
        """Return what the page's script reads: plotly takes a little markup in texts, so theirs is escaped."""
        texts = ("name", "x", "y", "text")
        traces = [{key: _escaped(value) if key in texts else value for key, value in t.items()} for t in self.traces]
        layout = dict(self.layout)
        for axis in ("xaxis", "yaxis"):
            if "categoryarray" in layout.get(axis, {}):
                layout[axis] = {**layout[axis], "categoryarray": _escaped(layout[axis]["categoryarray"])}
        return {"id": self.id, "traces": traces, "layout": layout}


def _escaped(value: Any) -> Any:
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return label(value, 200) if isinstance(value, str) else value


def charts_of(runs: Sequence[Run], titles: Sequence[str]) -> tuple[list[Chart], str]:
    """Make the charts of one run, or of two with the titles of both; and a sentence on what there was no room for."""
    names = [f" of {title}" for title in titles] if len(runs) > 1 else [""]
    afters = [f": {title}" for title in titles] if len(runs) > 1 else [""]
    of = list(zip(runs, afters, range(len(runs)), strict=True))
    found = dict.fromkeys(name for run in runs for name in run.names())
    own = [name for name in found if name not in _TITLES and not name.startswith("lr ") and name != "waited"]
    unscaled = all(value in (None, 1) for run in runs for value in run.column("loss_scale"))
    named = [name for name in _TITLES if not (name == "loss_scale" and unscaled)]
    made = [_curves(runs, names, name, _TITLES[name], name.replace("_", "-")) for name in named]
    made += [make(*each) for make in (_memory, _waits) for each in of]
    made += [_curves(runs, names, name, name.replace("_", " "), f"own-{n}") for n, name in enumerate(own[:_MOST_OWN])]
    made += [make(*each) for make in (_timeline, _placement, _plan) for each in of]
    left = len(own) - _MOST_OWN
    return [each for each in made if each], f"{left} more figures were logged, and are not drawn." if left > 0 else ""


# Over the steps


def _curves(runs: Sequence[Run], names: Sequence[str], name: str, title: str, id: str) -> Chart | None:
    """Draw a figure of all runs; a learning rate for each param group where they differ."""
    traces: list[dict[str, Any]] = []
    for number, (run, of_run) in enumerate(zip(runs, names, strict=True)):
        groups = [each for each in run.names() if each.startswith("lr ")] if name == "lr" else []
        for dash, each in zip(cycle(_DASHES), groups or [name], strict=False):
            points = {s: value for s, value in zip(run.steps, run.column(each), strict=True) if value is not None}
            if points:
                line = {"width": 1.5 if dash != "solid" else 2, "dash": dash}
                traces.append(_line(f"{each.replace('_', ' ')}{of_run}", points, number, line=line))
        if name == "loss" and run.evaluations:
            evaluations = dict(sorted(run.evaluations.items()))
            traces.append(_line(f"held out{of_run}", evaluations, number + 3, mode="lines+markers"))
    if not traces:
        return None
    yaxis: dict[str, Any] = {"tickformat": _FORMATS[name]} if name in _FORMATS else {}
    yaxis |= {"rangemode": "tozero"} if name in _FROM_ZERO else {}
    yaxis |= {"tickformat": "~s", "ticksuffix": "B"} if name.endswith("_bytes") else {}
    return Chart(id, title, traces, {"showlegend": len(traces) > 1, "yaxis": yaxis})


def _line(name: str, points: Points, tone: int, **more: Any) -> dict[str, Any]:
    kept = kept_points([list(points.values())])
    steps = list(points)
    mode = "lines+markers" if len(kept) <= _FEW else "lines"
    found = {"x": [steps[index] for index in kept], "y": [points[steps[index]] for index in kept]}
    return {"type": "scatter", "mode": mode, "name": name, **found, "tone": tone, "marker": {"size": 5}, **more}


def _memory(run: Run, name: str, number: int) -> Chart | None:
    """Draw the bytes on each tier, stacked, over the steps of a run."""
    unit, scale = byte_unit(int(max((sum(of_step.values()) for of_step in run.bytes_by_tier.values()), default=0.0)))
    found = {step: {t: n / scale for t, n in of_step.items()} for step, of_step in run.bytes_by_tier.items()}
    ranks = [f"Bytes are those of rank 0 of {run.world_size}."] if run.world_size > 1 else []
    yaxis = {"ticksuffix": f" {unit}", "rangemode": "tozero"}
    return _stacked(f"memory-{number}", f"Training state by tier{name}", found, TIERS, yaxis, ranks)


def _waits(run: Run, name: str, number: int) -> Chart | None:
    """Draw the share of each step in which compute stood still, stacked by what it waited for."""
    yaxis = {"tickformat": ".0%", "rangemode": "tozero"}
    note = "The share of a step in which compute stood still, by the row that it waited for."
    return _stacked(f"waits-{number}", f"What steps waited for{name}", run.waits, list(RESOURCES), yaxis, [note])


def _stacked(
    id: str,
    title: str,
    found: Mapping[int, Mapping[str, float]],
    names: Sequence[str],
    yaxis: dict[str, Any],
    notes: Sequence[str],
) -> Chart | None:
    """Draw figures by name on top of each other."""
    if not found:
        return None
    steps = sorted(found)
    columns = {name: [found[step].get(name, 0.0) for step in steps] for name in names}
    columns = {name: column for name, column in columns.items() if any(column)} or {"nothing": [0.0] * len(steps)}
    kept = kept_points(list(columns.values()))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(kept) <= 2 else "lines",
            "stackgroup": "all",
            "name": name,
            "x": [steps[index] for index in kept],
            "y": [column[index] for index in kept],
            "tone": _TONES.get(name, 3),
            "line": {"width": 1},
        }
        for name, column in columns.items()
    ]
    return Chart(id, title, traces, {"showlegend": True, "yaxis": yaxis}, notes)


def kept_points(columns: Sequence[Sequence[float]], most: int = MOST_POINTS) -> list[int]:
    """Choose the points of curves over the same steps that are drawn, by index, in order.

    Up to `most` are all kept. Of more, neighbours make groups of one size, and of each group every curve's least and
    greatest value stay: nothing that stands out is lost. The first and the last point stay too.

    Arguments:
        columns: the curves, of one length.
        most: how many points there may be, of all curves together.
    """
    count = len(columns[0]) if columns else 0
    if count <= most:
        return list(range(count))
    groups = max(1, most // (2 * len(columns)))
    kept = {0, count - 1}
    for group in range(groups):
        indices = range(group * count // groups, (group + 1) * count // groups)
        for column in columns:
            kept |= {min(indices, key=column.__getitem__), max(indices, key=column.__getitem__)}
    return sorted(kept)


# Of one step


def _timeline(run: Run, name: str, number: int) -> Chart | None:
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
            "text": [_about_piece(piece) for piece in pieces],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "tone": _TONES[row],
            "width": 0.8,
        }
        for row, pieces in drawn.items()
    ]
    waited = sum(found.waits.values())
    causes = ", ".join(f"{row} {waits / found.seconds:.0%}" for row, waits in list(found.waits.items())[:4])
    notes = [
        f"{seconds(found.seconds)}, bound by {found.bound_by}. Compute waited "
        f"{min(1.0, waited / found.seconds):.0%} of it{f' ({causes})' if causes else ''}."
    ]
    if any(len(drawn[row]) < len(pieces) for row, pieces in found.rows.items()):
        notes.append("Pieces of work next to each other are drawn as one.")
    if found.steps == 1:
        notes.append("The trace has one step: what it found under way when it began is not in it.")
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": unit}, "range": [0, found.seconds * scale]},
        "yaxis": {"categoryorder": "array", "categoryarray": list(drawn)[::-1], "fixedrange": True, "automargin": True},
        "hovermode": "closest",
        "showlegend": False,
    }
    return Chart(f"timeline-{number}", f"One step{name}", traces, layout, notes, _uses(found), 110 + 34 * len(drawn))


def _about_piece(piece: Piece) -> str:
    more = f" and {piece.count - 1:,} more" if piece.count > 1 else ""
    moved = f", {size(piece.nbytes)}" if piece.nbytes else ""
    return f"{piece.name[:80]}{more}: {seconds(piece.stop - piece.start)}{moved}"


def _uses(found: Timeline) -> Table:
    """List how each row was used, and what compute waited for the longest."""
    rows: list[list[object]] = []
    for row, pieces in found.rows.items():
        busy, nbytes = sum(piece.stop - piece.start for piece in pieces), sum(piece.nbytes for piece in pieces)
        moved = [size(nbytes), f"{nbytes / busy / 1e9:.2f} GB/s" if busy else ""] if nbytes else ["", ""]
        said = "what compute waited for" if row == WAITING else RESOURCES[row]
        rows.append([row, said, f"{busy / found.seconds:.0%}", seconds(busy), f"{len(pieces):,}", *moved])
    causes: defaultdict[str, float] = defaultdict(float)
    for piece in found.rows.get(WAITING, ()):
        causes[piece.name] += piece.stop - piece.start
    longest = sorted(causes.items(), key=lambda item: -item[1])[:10]
    rows += [[name, "", f"{waited / found.seconds:.0%}", seconds(waited), "", "", ""] for name, waited in longest]
    return Table(["row", "resource", "busy", "for", "pieces", "bytes", "speed"], rows)


# After a step, and against the plan


def _placement(run: Run, name: str, number: int) -> Chart | None:
    """Draw the bytes of each kind on each tier."""
    found = bytes_by_kind(run)
    if not found:
        return None
    tiers = [tier for tier in TIERS if any(tier in by_tier for by_tier in found.values())]
    unit, scale = byte_unit(int(max(sum(by_tier.get(tier, 0) for by_tier in found.values()) for tier in tiers)))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": tiers,
            "x": [by_tier.get(tier, 0) / scale for tier in tiers],
            "tone": _TONES.get(kind, (4, 6)[place % 2]),
        }
        for place, (kind, by_tier) in enumerate(found.items())
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"ticksuffix": f" {unit}"},
        "yaxis": {"categoryorder": "array", "categoryarray": tiers[::-1], "fixedrange": True, "automargin": True},
        "hovermode": "closest",
        "showlegend": True,
    }
    notes = [f"After step {run.placement_step:,}{', on rank 0 alone' if run.world_size > 1 else ''}."]
    return Chart(f"placement-{number}", f"Where every byte was{name}", traces, layout, notes, height=260)


def bytes_by_kind(run: Run) -> dict[str, dict[str, float]]:
    """Add up where every byte was, by kind and tier."""
    found: dict[str, dict[str, float]] = {}
    for row in run.placement:
        if row["tier"] in TIERS:
            by_tier = found.setdefault(row["kind"][:80], {})
            by_tier[row["tier"]] = by_tier.get(row["tier"], 0) + row["nbytes"]
    return found


def _plan(run: Run, name: str, number: int) -> Chart | None:
    """Hold what a plan predicts against what was measured."""
    plan = run.plan or {}
    predicted = _sizes({"step": plan.get("step_s")}) | _sizes(plan.get("busy_s"))
    if not predicted:
        return None
    measured: dict[str, float] = {}
    if run.timeline is not None:
        steps = [f["step_seconds"] for f in run.figures.values() if "step_seconds" in f and "traced" not in f]
        measured = {"step": median(steps[1:] or steps or [run.timeline.seconds]), **run.timeline.busy_seconds}
    names = [each for each in dict.fromkeys((*predicted, *measured)) if each in predicted or measured[each] > 0]
    traces = [
        {"type": "bar", "name": said, "x": names, "y": [times.get(each, 0.0) for each in names], "tone": tone}
        for said, times, tone in (("planned", predicted, 7), ("measured", measured, 0))
        if times
    ]
    rows = [_compared(each, predicted.get(each), measured.get(each), seconds) for each in names]
    kinds = bytes_by_kind(run)
    for tier, planned in _sizes(plan.get("bytes")).items():
        rest = sum(by_tier.get(tier, 0) for kind, by_tier in kinds.items() if kind not in _NOT_AT_REST)
        rows.append(_compared(f"at rest on {tier}", planned, rest if kinds else None, lambda nbytes: size(int(nbytes))))
    for name, planned in _sizes(plan.get("written_bytes")).items():
        writes = run.writes().get(name)
        rows.append(_compared(f"written to {name}", planned, writes and writes.in_a_step, drive_size))
    off = [row[0] for row in rows if row[3].endswith("!")]
    notes = ["Seconds of a step, and of each resource in it."]
    notes += [f"More than {TOLERANCE:.0%} off: {', '.join(off)}."] if off else []
    notes += [] if measured else ["No step was traced, so nothing was measured."]
    layout = {"barmode": "group", "yaxis": {"ticksuffix": " s"}, "showlegend": True, "hovermode": "x unified"}
    table = Table(["", "planned", "measured", "off by"], rows)
    return Chart(f"plan-{number}", f"Plan against measured{name}", traces, layout, notes, table, 340)


def drive_size(nbytes: float) -> str:
    """Write bytes with three digits in the units of a drive's maker, whose powers are of ten."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((each for each in units if nbytes >= each[1]), ("B", 1.0))
    return f"{digits(nbytes / scale)} {unit}"


def _compared(name: str, planned: float | None, measured: float | None, written: Any) -> list[str]:
    change = measured / planned - 1 if planned and measured is not None else None
    texts = ["" if value is None else written(value) for value in (planned, measured)]
    return [name, *texts, "" if change is None else f"{share(change)}{' !' if abs(change) > TOLERANCE else ''}"]


def _sizes(values: Any) -> dict[str, float]:
    """Take the numbers of a mapping that can be drawn."""
    found = values.items() if isinstance(values, dict) else ()
    return {n: float(v) for n, v in found if type(v) in (int, float) and 0 <= v <= MOST_NUMBER}
