"""What is on the page, in order: a few numbers, charts, settings, and what the model has written."""

from collections.abc import Sequence

from penstock.cli.reporting.bars import placement_chart, plan_chart, timeline_chart, units_table
from penstock.cli.reporting.chart import Chart, Table
from penstock.cli.reporting.curves import line_charts, memory_chart, own_charts, peaks_chart, waits_chart
from penstock.cli.reporting.markup import Html, element, text
from penstock.cli.reporting.run import Run, flattened
from penstock.cli.training.reporting.formats import format_bytes, format_seconds

#: Samples of a run that are shown, at most: the newest, with as many of the first as a quarter of them.
MOST_SAMPLES = 40
#: Names of what is left out.
MOST_ODD = 20


def charts_of(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    """Make the charts of one run, or of two side by side, and what is to be said beside them."""
    names = names_of(runs)
    own, told = own_charts(runs, names)
    each = [
        (run, f": {name}" if len(runs) > 1 else "", number)
        for number, (run, name) in enumerate(zip(runs, titles(runs), strict=True))
    ]
    made: list[Chart | None] = [*line_charts(runs, names)]
    made += [make(*of_run) for make in (memory_chart, waits_chart) for of_run in each]
    made += [peaks_chart(runs, names), *own]
    made += [make(*of_run) for make in (timeline_chart, placement_chart, plan_chart) for of_run in each]
    return [chart for chart in made if chart is not None], [told] if told else []


def titles(runs: Sequence[Run]) -> list[str]:
    """Name the runs: by their folders, as far up as tells them apart."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def names_of(runs: Sequence[Run]) -> list[str]:
    """Say what a curve's name ends in: nothing for a run alone."""
    return [f" of {name}" for name in titles(runs)] if len(runs) > 1 else [""]


def figure(chart: Chart) -> Html:
    """Write the place of a chart, which the page's script fills, and its table."""
    return element(
        "figure",
        element("figcaption", element("h2", chart.title), *(element("p", note) for note in chart.notes)),
        element("div", class_="plot", role="img", aria_label=chart.title, style=f"height:{chart.height}px"),
        details("As a table", table(chart.table)),
        id=chart.id,
        class_="wide" if chart.is_wide else None,
    )


def table(of: Table) -> Html:
    """Write a table; what is left out of it is said below."""
    head = element("tr", *(element("th", name, scope="col") for name in of.heads))
    rows = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in of.rows
    ]
    made = element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")
    return Html(made + (element("p", of.note) if of.note else ""))


def details(title: str, *inside: object, is_open: bool = False) -> Html:
    """Write something that opens when it is asked for."""
    return element("details", element("summary", title), *inside, open="" if is_open else None)


def numbers(runs: Sequence[Run]) -> Html:
    """Write the few numbers that people look for first, a column for each run."""
    columns = [_numbers(run) for run in runs]
    heads = dict.fromkeys(name for column in columns for name in column)
    if len(runs) > 1:
        rows = [[name, *(column.get(name, "") for column in columns)] for name in heads]
        return table(Table(["", *titles(runs)], rows))
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in columns[0].items())
    )


def _numbers(run: Run) -> dict[str, str]:
    steps, found = run.steps, {}
    if steps:
        found["steps"] = f"{steps[-1]:,}"
        losses = [loss for loss in run.column("loss") if loss is not None]
        found |= {"last loss": f"{losses[-1]:.4f}"} if losses else {}
    if run.evaluations:
        best = min(run.evaluations, key=lambda step: run.evaluations[step])
        found["lowest held-out loss"] = f"{run.evaluations[best]:.4f} after step {best:,}"
    speeds = sorted(speed for speed in run.column("tokens_per_second") if speed is not None)
    found |= {"tokens a second, median": f"{speeds[len(speeds) // 2]:,.0f}"} if speeds else {}
    if run.bytes_by_tier:
        last = run.bytes_by_tier[max(run.bytes_by_tier)]
        found["training state"] = ", ".join(f"{tier} {format_bytes(int(size))}" for tier, size in last.items())
    skipped = [count for count in run.column("skipped_count") if count]
    found |= {"steps skipped": f"{int(skipped[-1]):,}"} if skipped else {}
    if run.timeline is not None:
        found["bound by"] = run.timeline.bound_by
    seconds = run.end.get("seconds")
    if isinstance(seconds, int | float) and 0 <= seconds < 1e9:
        found["took"] = format_seconds(seconds)
    return found


def remarks(runs: Sequence[Run], told: Sequence[str]) -> list[Html]:
    """Write what has to be known to read the page."""
    said = list(told)
    for run, name in zip(runs, titles(runs), strict=True):
        of_run = f"{name}: " if len(runs) > 1 else ""
        if run.world_size > 1:
            said.append(
                f"{of_run}{run.world_size} ranks. Bytes are per rank: these, the waits and the timeline are those of "
                "rank 0 alone. Losses and tokens are as the loop has logged them (penstock train: of all ranks)."
            )
        if run.unread:
            said.append(f"{of_run}{run.unread:,} lines of metrics.jsonl could not be read, and are left out.")
        if run.odd:
            names = list(run.odd)
            more = f" and {len(names) - MOST_ODD:,} more" if len(names) > MOST_ODD else ""
            said.append(f"{of_run}left out, because it cannot be drawn: {', '.join(names[:MOST_ODD])}{more}.")
        if not run.end:
            said.append(f"{of_run}the run has not come to its end, or not yet.")
    return [element("p", each, class_="remark") for each in said]


def settings(runs: Sequence[Run]) -> Html:
    """Write the settings, a column for each run: what differs first."""
    columns = [dict(flattened(run.about)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return text("")
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    if len(runs) > 1:
        rows.sort(key=lambda row: row[1] == row[2])
        different = sum(row[1] != row[2] for row in rows)
        note = f"{different:,} of {len(rows):,} differ: the first ones."
        return _section(
            "Settings", details("Settings of both", table(Table(["", *titles(runs)], rows, note)), is_open=True)
        )
    return _section("Settings", details(f"{len(rows):,} settings", table(Table(["", "value"], rows))))


def units(runs: Sequence[Run]) -> Html:
    """Write where every byte was, unit by unit."""
    tables = [
        details(f"Unit by unit{f': {name}' if len(runs) > 1 else ''}", table(units_table(run)))
        for run, name in zip(runs, titles(runs), strict=True)
        if run.placement
    ]
    return _section("Bytes of each unit", *tables) if tables else text("")


def samples(runs: Sequence[Run]) -> Html:
    """Write what the models have written, as text."""
    made: list[Html] = []
    for run, name in zip(runs, titles(runs), strict=True):
        shown = run.samples
        if len(shown) > MOST_SAMPLES:
            first = MOST_SAMPLES // 4
            shown = [*shown[:first], *shown[first - MOST_SAMPLES :]]
            made.append(element("p", f"{len(shown):,} of {len(run.samples):,} samples.", class_="remark"))
        made += [
            element(
                "article",
                element("h3", f"After step {sample.step:,}{f', {name}' if len(runs) > 1 else ''}"),
                element("pre", element("b", sample.prompt), sample.text),
            )
            for sample in shown
        ]
    return _section("Samples", *made) if made else text("")


def _section(title: str, *inside: Html) -> Html:
    return element("section", element("h2", title), *inside)
