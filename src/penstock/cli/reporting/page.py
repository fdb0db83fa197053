"""One file of a run, or of two: a page that needs nothing else, no network either."""

import stat
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.cli.reporting import sections
from penstock.cli.reporting.markup import Html, script_json, text
from penstock.cli.reporting.run import Run, read_run
from penstock.errors import ConfigError, one_line
from penstock.files import write_whole

PAGE_NAME, COMPARED_NAME = "report.html", "compared.html"
INSTALL = "pip install 'penstock[train]'"
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
    _check_free(path)
    try:
        write_whole(path, page(runs, script.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(
            f"{one_line(str(path))} cannot be written: {error.strerror}. Give --out another path."
        ) from error
    return path


def _check_free(path: Path) -> None:
    """Refuse to put a page in the place of what is none: a device, a pipe, a link, somebody's file."""
    try:
        if stat.S_ISREG(path.lstat().st_mode):
            with path.open("rb") as file:
                if file.read(len(_BEGINNING)).lower() == _BEGINNING:
                    return
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{one_line(str(path))} cannot be written: {why}. Give --out another path.") from error
    raise ConfigError(f"{path} is there, and is no page of a run. Give --out another path.")


def page(runs: Sequence[Run], plotly: str) -> str:
    """Write the page.

    Arguments:
        runs: one, or two that are held against each other.
        plotly: the script that draws.
    """
    charts, told = sections.charts_of(runs)
    parts = {
        "title": text(" and ".join(sections.titles(runs))),
        "style": Html((_HERE / "page.css").read_text(encoding="utf-8")),
        "remarks": Html("".join(sections.remarks(runs, told))),
        "numbers": sections.numbers(runs),
        "charts": Html("".join(map(sections.figure, charts))),
        "units": sections.units(runs),
        "settings": sections.settings(runs),
        "samples": sections.samples(runs),
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
