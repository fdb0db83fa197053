"""Charts over the steps of a run, or of two."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.cli.reporting.chart import Chart, Table, unit_of
from penstock.cli.reporting.markup import label
from penstock.cli.reporting.run import TIERS, Run
from penstock.cli.reporting.thin import Column, about_thinning, kept_points
from penstock.cli.training.reporting.formats import format_bytes
from penstock.ext.observe.timeline import RESOURCES

#: Rows of the table below a chart, at most, and charts of figures that people log by names of their own.
MOST_ROWS, MOST_OWN = 100, 12
#: Few steps have their points drawn: one alone would be no line.
_FEW = 40
_TITLES = {
    "loss": ("Loss", ""),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm, before clipping", ""),
    "tokens_per_second": ("Tokens a second", ""),
    "loss_scale": ("Loss scale", ""),
    "mfu": ("Model FLOPs utilisation", ""),
}
_OF_OTHERS = ("device_peak_bytes", "host_peak_bytes", "waited")
_TIER_TONES = {"device": 0, "cpu": 2, "nvme": 1}
_ROW_TONES = {"upload": 5, "download": 4, "collective": 6, "update": 2, "device update": 2, "write": 7}


def line_charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Draw figures that all runs are held against each other in, a chart for each."""
    shown = [name for name in _TITLES if any(_has(run, name) for run in runs)]
    if all(map(_is_unscaled, runs)):
        shown = [name for name in shown if name != "loss_scale"]
    return [_lines(runs, names, name, *_TITLES[name]) for name in shown]


def own_charts(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[Chart], str]:
    """Draw what else was logged; and say in a sentence what there was no room for."""
    found = dict.fromkeys(name for run in runs for name in run.names())
    own = [name for name in found if name not in _TITLES and name not in _OF_OTHERS and not name.startswith("lr ")]
    charts = [
        _lines(runs, names, name, name.replace("_", " "), "", id=f"own-{number}")
        for number, name in enumerate(own[:MOST_OWN])
    ]
    left = own[MOST_OWN:]
    return charts, f"{len(left)} more figures were logged, and are not drawn." if left else ""


def memory_chart(run: Run, name: str, number: int) -> Chart | None:
    """Draw the bytes on each tier, stacked, over the steps of a run."""
    if not run.bytes_by_tier:
        return None
    steps = sorted(run.bytes_by_tier)
    columns = {tier: [run.bytes_by_tier[step].get(tier, 0.0) for step in steps] for tier in TIERS}
    columns = {tier: column for tier, column in columns.items() if any(column)}
    ranks = f"Bytes are those of rank 0 of {run.world_size}." if run.world_size > 1 else ""
    unit, size = unit_of(max((sum(of_step) for of_step in zip(*columns.values(), strict=True)), default=0.0))
    peaks = ", ".join(f"{tier} {format_bytes(int(max(column)))}" for tier, column in columns.items())
    return _stacked(
        f"memory-{number}",
        f"Training state by tier{name}",
        steps,
        columns,
        tones=_TIER_TONES,
        notes=[f"The most at the end of a step: {peaks}." if peaks else "", ranks],
        written=lambda value: format_bytes(int(value)),
        layout={"yaxis": {"ticksuffix": f" {unit}", "rangemode": "tozero"}},
        size=size,
    )


def waits_chart(run: Run, name: str, number: int) -> Chart | None:
    """Draw the share of each step in which compute stood still, stacked by what it waited for."""
    steps = sorted(run.waits)
    rows = [row for row in RESOURCES if any(row in run.waits[step] for step in steps)]
    columns: dict[str, list[float]] = {row: [run.waits[step].get(row, 0.0) for step in steps] for row in rows}
    if not steps:
        return None
    if not columns:
        columns = {"nothing": [0.0 for _ in steps]}
    return _stacked(
        f"waits-{number}",
        f"What steps waited for{name}",
        steps,
        columns,
        tones=_ROW_TONES,
        notes=["The share of a step in which compute stood still, by the row that it waited for."],
        written=lambda value: f"{value:.1%}",
        layout={"yaxis": {"tickformat": ".0%", "rangemode": "tozero"}},
    )


def peaks_chart(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    """Draw the most memory in use, as torch and the system count it."""
    traces: list[dict[str, Any]] = []
    table: list[list[object]] = []
    thinned = ""
    for number, (run, of_run) in enumerate(zip(runs, names, strict=True)):
        for name, said, dash in (
            ("device_peak_bytes", "device", "solid"),
            ("host_peak_bytes", "process on the host", "dot"),
        ):
            if _has(run, name):
                xs, found, told = _points(run.steps, run.column(name))
                ys = [None if size is None else size / (1 << 30) for size in found]
                thinned = thinned or told
                traces.append(_line(f"{said}{of_run}", xs, ys, tone=number, dash=dash))
                known = [size for size in found if size is not None]
                table.append([f"{said}{of_run}", format_bytes(int(known[-1])), format_bytes(int(max(known)))])
    if not traces:
        return None
    return Chart(
        "peaks",
        "Most memory in use",
        traces,
        Table(["", "at the end", "most"], table),
        {"yaxis": {"ticksuffix": " GiB", "rangemode": "tozero"}, "showlegend": True},
        [thinned] if thinned else [],
    )


def _lines(runs: Sequence[Run], names: Sequence[str], name: str, title: str, unit: str, *, id: str = "") -> Chart:
    """Draw one figure of all runs."""
    traces: list[dict[str, Any]] = []
    notes: list[str] = []
    columns: list[tuple[str, dict[int, float]]] = []
    for number, (run, of_run) in enumerate(zip(runs, names, strict=True)):
        rates = [each for each in run.names() if each.startswith("lr ")] if name == "lr" else []
        for dash, each in enumerate(rates or [name]):
            if not _has(run, each):
                continue
            column = run.column(each)
            xs, ys, told = _points(run.steps, column)
            notes += [told] if told and told not in notes else []
            said = f"group {each.removeprefix('lr ')}" if rates else name.replace("_", " ")
            style = ("solid", "dot", "dash", "dashdot")[dash % 4]
            traces.append(_line(f"{said}{of_run}", xs, ys, tone=number, dash=style))
            columns.append((f"{said}{of_run}", _known(run.steps, column)))
        if name == "loss" and run.evaluations:
            steps = sorted(run.evaluations)
            losses: list[float | None] = [run.evaluations[step] for step in steps]
            traces.append(_line(f"held out{of_run}", steps, losses, tone=number + 3, mode="lines+markers"))
            columns.append((f"held out{of_run}", _known(steps, losses)))
    layout: dict[str, Any] = {"showlegend": len(traces) > 1, "yaxis": {}}
    layout["yaxis"] |= {"tickformat": ".2~e"} if name == "lr" else {}
    layout["yaxis"] |= {"rangemode": "tozero"} if name in ("tokens_per_second", "lr", "mfu") else {}
    layout["yaxis"] |= {"tickformat": ".1%"} if name == "mfu" else {}
    return Chart(
        id or name.replace("_", "-"), title, traces, _over_steps(columns, lambda v: f"{v:.6g}{unit}"), layout, notes
    )


def _stacked(
    id: str,
    title: str,
    steps: Sequence[int],
    columns: dict[str, list[float]],
    *,
    tones: dict[str, int],
    notes: Sequence[str],
    written: Callable[[float], str],
    layout: dict[str, Any],
    size: float = 1.0,
) -> Chart:
    """Draw columns on top of each other, in units of a size."""
    kept = kept_points(list(columns.values()))
    xs = [steps[index] for index in kept]
    mode = "lines+markers" if len(xs) <= 2 else "lines"
    traces = [
        {
            "type": "scatter",
            "mode": mode,
            "stackgroup": "all",
            "name": label(name),
            "x": xs,
            "y": [column[index] / size for index in kept],
            "tone": tones.get(name, 3),
            "line": {"width": 1},
        }
        for name, column in columns.items()
    ]
    told = [note for note in (*notes, about_thinning(len(steps), len(kept))) if note]
    table = _over_steps([(name, dict(zip(steps, column, strict=True))) for name, column in columns.items()], written)
    return Chart(id, title, traces, table, {"showlegend": True, **layout}, told)


def _line(
    name: str, xs: Sequence[int], ys: Column, *, tone: int, dash: str = "solid", mode: str = ""
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode or ("lines+markers" if len(xs) <= _FEW else "lines"),
        "name": label(name),
        "x": list(xs),
        "y": list(ys),
        "tone": tone,
        "line": {"width": 2 if dash == "solid" else 1.5, "dash": dash},
        "marker": {"size": 5},
    }


def _points(steps: Sequence[int], column: Column) -> tuple[list[int], list[float | None], str]:
    """Choose the points of a curve, and say what is left out. Steps of which the figure is not known have none."""
    known = [(step, value) for step, value in zip(steps, column, strict=True) if value is not None]
    values = [value for _, value in known]
    kept = kept_points([values])
    return [known[index][0] for index in kept], [values[index] for index in kept], about_thinning(len(known), len(kept))


def _known(steps: Sequence[int], column: Column) -> dict[int, float]:
    return {step: value for step, value in zip(steps, column, strict=True) if value is not None}


def _over_steps(columns: Sequence[tuple[str, dict[int, float]]], written: Callable[[float], str]) -> Table:
    """Write columns below each other's heads, of so many steps as people read."""
    steps = sorted({step for _, column in columns for step in column})
    every = -(-len(steps) // MOST_ROWS) if steps else 1
    shown = steps[::every] + (steps[-1:] if steps and (len(steps) - 1) % every else [])
    rows = [[f"{step:,}", *(written(c[step]) if step in c else "" for _, c in columns)] for step in shown]
    note = f"{len(shown):,} of {len(steps):,} steps." if len(shown) < len(steps) else ""
    return Table(["step", *(name for name, _ in columns)], rows, note)


def _has(run: Run, name: str) -> bool:
    return any(name in of_step or f"{name} 0" in of_step for of_step in run.figures.values())


def _is_unscaled(run: Run) -> bool:
    return all(value in (None, 1) for value in run.column("loss_scale"))
