"""One file of a run, or of two: a page that needs nothing else, no network either."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.cli.reporting.charts import MOST_POINTS, Chart, Table, charts_of, drive_size
from penstock.cli.reporting.markup import Html, element, script_json, text
from penstock.cli.reporting.run import Run, flattened, read_run
from penstock.errors import ConfigError, one_line
from penstock.files import check_own, open_regular, write_whole
from penstock.planner.formatting import size

PAGE_NAME, COMPARED_NAME = "report.html", "compared.html"
INSTALL = "pip install 'penstock[train]'"
#: Samples of a run, the newest, and names of what is left out, at most.
_MOST_SAMPLES, _MOST_ODD = 40, 20
_BEGINNING = b"<!doctype html>"
_HERE = Path(__file__).parent
_PLOTLY = Path("package_data", "plotly.min.js")


def plotly_script() -> Path | None:
    """Find the script that draws, which plotly has in its folder; `None` where it is not installed."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / _PLOTLY
    return found if found.is_file() else None


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Make the page of a run, or of two side by side.

    Arguments:
        folders: one or two, as `penstock train` or `Optimizer.record` have written them.
        out: the file; `None` for one in the first folder. A page that is there is replaced as a whole.

    Returns:
        The path of the file.

    Raises:
        ConfigError: plotly is not installed, a folder is not that of a run, or the file cannot be written, or is
            something else than a page.
    """
    script = plotly_script()
    if script is None:
        raise ConfigError(f"penstock report needs plotly, which is not installed. Install it with: {INSTALL}")
    runs = [read_run(folder) for folder in folders]
    path = out or folders[0] / (PAGE_NAME if len(runs) == 1 else COMPARED_NAME)
    try:
        if check_own(path).exists() and not _is_page(path):
            raise ConfigError(f"{path} is there, and is no page of a run. Give --out another path.")
        write_whole(path, page(runs, script.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{one_line(str(path))} cannot be written: {error.strerror}. Give --out another path."
        ) from error
    return path


def _is_page(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(_BEGINNING)).lower() == _BEGINNING


def page(runs: Sequence[Run], plotly: str) -> str:
    """Write the page.

    Arguments:
        runs: one, or two that are held against each other.
        plotly: the script that draws.
    """
    names = [run.name for run in runs]
    titles = names if len(set(names)) == len(names) else [str(run.folder) for run in runs]
    charts, told = charts_of(runs, titles)
    each = list(zip(runs, titles, strict=True))
    parts = {
        "title": text(" and ".join(titles)),
        "style": Html((_HERE / "page.css").read_text(encoding="utf-8")),
        "remarks": Html("".join(element("p", said, class_="remark") for said in _remarks(runs, titles, told))),
        "numbers": Html("".join(_numbers(run, title if len(runs) > 1 else "") for run, title in each)),
        "charts": Html("".join(map(_figure, charts))),
        "settings": _settings(runs, titles),
        "samples": _samples(runs, titles),
        "data": script_json([chart.to_dict() for chart in charts]),
        "plotly": Html(plotly),
        "script": Html((_HERE / "page.js").read_text(encoding="utf-8")),
    }
    written: list[str] = []
    # In one pass: what is put in is never looked at again, whatever it looks like.
    for piece in (_HERE / "page.html").read_text(encoding="utf-8").split("{{"):
        name, closed, rest = piece.partition("}}")
        written += [parts[name], rest] if closed else [piece]
    return "".join(written)


def _figure(chart: Chart) -> Html:
    """Write the place of a chart, which the page's script fills, and its table."""
    return element(
        "figure",
        element("figcaption", element("h2", chart.title), *(element("p", note) for note in chart.notes)),
        element("div", class_="plot", role="img", aria_label=chart.title, style=f"height:{chart.height}px"),
        element("details", element("summary", "As a table"), _table(chart.table)),
        id=chart.id,
        class_="wide" if chart.is_wide else None,
    )


def _table(of: Table) -> Html:
    """Write a table; what is left out of it is said below."""
    head = element("tr", *(element("th", name, scope="col") for name in of.heads))
    rows = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in of.rows
    ]
    made = element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll")
    return Html(made + (element("p", of.note) if of.note else ""))


def _remarks(runs: Sequence[Run], titles: Sequence[str], told: str) -> list[str]:
    """Write what has to be known to read the page."""
    said = [told] if told else []
    if any(len(run.figures) > MOST_POINTS for run in runs):
        said.append("Of longer curves the least and the greatest of each group of neighbours are drawn.")
    for run, title in zip(runs, titles, strict=True):
        of_run = f"{title}: " if len(runs) > 1 else ""
        if run.world_size > 1:
            said.append(
                f"{of_run}{run.world_size} ranks. Bytes are per rank: these, the waits and the timeline are those of "
                "rank 0 alone. Losses and tokens are as the loop has logged them (penstock train: of all ranks)."
            )
        if run.unread:
            said.append(f"{of_run}{run.unread:,} lines of metrics.jsonl could not be read, and are left out.")
        if run.odd:
            names = list(run.odd)
            more = f" and {len(names) - _MOST_ODD:,} more" if len(names) > _MOST_ODD else ""
            said.append(f"{of_run}left out, because it cannot be drawn: {', '.join(names[:_MOST_ODD])}{more}.")
        if not run.end:
            said.append(f"{of_run}the run has not come to its end, or not yet.")
    return said


def _numbers(run: Run, title: str) -> Html:
    """Write the few numbers of a run that are looked for first."""
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
        found["training state"] = ", ".join(f"{tier} {size(int(nbytes))}" for tier, nbytes in last.items())
    for name, writes in run.writes().items():
        total, step, day = map(drive_size, writes)
        found[f"written to {name}"] = f"{total}, {step} a step, {day} a day"
    skipped = [count for count in run.column("skipped_count") if count]
    found |= {"steps skipped": f"{int(skipped[-1]):,}"} if skipped else {}
    if run.timeline is not None:
        found["bound by"] = run.timeline.bound_by
    took = run.end.get("seconds")
    if isinstance(took, int | float) and 0 <= took < 1e9:
        found["took"] = f"{int(took) // 3600}:{int(took) // 60 % 60:02}:{int(took) % 60:02}"
    cells = (element("div", element("dt", name), element("dd", value)) for name, value in found.items())
    return Html((element("h3", title) if title else "") + element("dl", *cells))


def _settings(runs: Sequence[Run], titles: Sequence[str]) -> Html:
    """Write the settings, a column for each run: what differs first."""
    columns = [dict(flattened(run.about)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    different = [row for row in rows if len(set(row[1:])) > 1]
    rows = different + [row for row in rows if row not in different]
    note = f"{len(different):,} of {len(rows):,} differ: the first ones." if len(runs) > 1 else ""
    opened = element("details", element("summary", f"{len(rows):,} settings"), _table(Table(["", *titles], rows, note)))
    return element("section", element("h2", "Settings"), opened) if rows else text("")


def _samples(runs: Sequence[Run], titles: Sequence[str]) -> Html:
    """Write what the models have written, as text: the newest."""
    made = [
        element(
            "article",
            element("h3", f"After step {sample.step:,}{f', {title}' if len(runs) > 1 else ''}"),
            element("pre", element("b", sample.prompt), sample.text),
        )
        for run, title in zip(runs, titles, strict=True)
        for sample in run.samples[-_MOST_SAMPLES:]
    ]
    return element("section", element("h2", "Samples"), *made) if made else text("")
