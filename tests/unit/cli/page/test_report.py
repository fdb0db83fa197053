"""`penstock report`: one file, nothing in it that is not ours, and a line where it cannot be made."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Placement
from penstock.cli.reporting import page as pages
from penstock.cli.reporting.charts import drive_size
from penstock.cli.reporting.page import page
from penstock.cli.reporting.run import read_run
from tests.lib.memory import disks
from tests.unit.cli.page.runs import CURVES, FOLDER_NAME, HOSTILE, Seen, lines_of, record_loop, write_plan

#: Elements of a page without charts, beside which data must make none.
OURS = set(
    (  # noqa: SIM905 - a list of a line each
        "html head meta title style body header h1 h2 h3 p dl div dt dd noscript main figure figcaption details "
        "summary table thead tbody tr th td section article pre b script"
    ).split()
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plain loop, all names of which are hostile, with a plan beside it."""
    made = tmp_path_factory.mktemp("runs") / FOLDER_NAME
    record_loop(made, Placement(params="cpu", optimizer={"cpu": 0.5, "device": 0.5}))
    write_plan(made)
    return made


def test_names_and_samples_are_text_everywhere(folder: Path) -> None:
    seen = Seen(page([read_run(folder)], "/* plotly */"))
    assert set(seen.tags) <= OURS
    assert len([tag for tag in seen.tags if tag == "script"]) == 3
    assert not [name for name in seen.attributes if name.startswith("on")]
    for text in (*HOSTILE, FOLDER_NAME):
        assert text in seen.said
    (data,) = [script for script in seen.scripts if script.startswith("[{")]
    assert not set(data) & set("<>&\u2028\u2029")
    shown = [text for chart in json.loads(data) for trace in chart["traces"] for text in texts(trace)]
    assert any("script" in text for text in shown)
    assert not [text for text in shown if set(text) & set("<>") and text != "%{text}<extra></extra>"]


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [value] if isinstance(value, str) else []


def test_every_chart_has_a_table_that_says_the_same(folder: Path) -> None:
    written = page([read_run(folder)], "")
    figures = re.findall(r'<figure id="([\w-]+)".*?</figure>', written, re.S)
    assert CURVES | {"plan-0", "own-0"} == set(figures)
    assert len(re.findall(r"<summary>As a table</summary>", written)) == len(figures)
    losses = [line["loss"] for line in lines_of(folder) if line["event"] == "step" and "loss" in line]
    for loss in losses:
        assert f"<td>{loss:.6g}</td>" in written


def test_a_plan_is_held_against_what_was_measured(folder: Path) -> None:
    written = page([read_run(folder)], "")
    plan = written[written.index('id="plan-0"') :]
    assert "<td>500 ms</td>" in plan
    assert "at rest on device" in plan
    assert "More than 15% off: step" in plan


def test_what_was_written_is_told_by_step_and_day_and_beside_the_plan(tmp_path: Path) -> None:
    record_loop(tmp_path, Placement(optimizer="nvme", nvme_path=disks()))
    write_plan(tmp_path)
    run = read_run(tmp_path)
    writes = run.writes()["nvme"]
    took = sum(figures["step_seconds"] for figures in run.figures.values())
    assert writes.in_a_step == writes.nbytes / 6 > 0
    assert writes.in_a_day == pytest.approx(writes.nbytes / took * 86400)
    written = page([run], "")
    assert (
        f"<dt>written to nvme</dt><dd>{drive_size(writes.nbytes)}, {drive_size(writes.in_a_step)} a step, " in written
    )
    assert f'<th scope="row">written to nvme</th><td>3.00 MB</td><td>{drive_size(writes.in_a_step)}</td>' in written


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (80.04e9, "80.0 GB"), (1.1e12, "1.10 TB"), (6e14, "600 TB")]
)
def test_bytes_of_drives_are_written_as_their_makers_do(nbytes: float, text: str) -> None:
    assert drive_size(nbytes) == text


def test_the_page_needs_nothing_else(folder: Path) -> None:
    written = page([read_run(folder)], "")
    assert "default-src 'none'" in written
    assert 'name="viewport"' in written
    assert "prefers-color-scheme: dark" in written
    seen = Seen(written)
    assert not {"src", "href", "srcset", "action"} & seen.attributes.keys()
    assert not re.findall(r"@import|url\(|https?:", "".join(seen.scripts) + written[: written.index("</style>")])
    assert "{{" not in written


def test_two_runs_share_their_charts_and_have_columns_of_their_own(folder: Path, tmp_path: Path) -> None:
    record_loop(tmp_path / "other", Placement(), steps=3, hostile=False)
    written = page([read_run(folder), read_run(tmp_path / "other")], "")
    (data,) = [script for script in Seen(written).scripts if script.startswith("[{")]
    charts = {chart["id"]: chart for chart in json.loads(data)}
    assert [trace["name"] for trace in charts["loss"]["traces"] if "of other" in trace["name"]] == [
        "loss of other",
        "held out of other",
    ]
    assert {"memory-0", "memory-1", "timeline-0", "timeline-1"} <= charts.keys()
    assert "differ: the first ones" in written
    assert '<th scope="col">other</th>' in written


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for above in ("a", "b"):
        record_loop(tmp_path / above / "run", Placement(), steps=1, hostile=False)
    written = page([read_run(tmp_path / above / "run") for above in ("a", "b")], "")
    assert f"<title>{tmp_path}/a/run and {tmp_path}/b/run</title>" in written


class TestRanks:
    def test_a_page_of_several_ranks_says_whose_bytes_it_has(self, tmp_path: Path) -> None:
        record_loop(tmp_path, Placement(), steps=1)
        file = tmp_path / "metrics.jsonl"
        file.write_text(file.read_text().replace('"world_size": 1', '"world_size": 8'))
        written = page([read_run(tmp_path)], "")
        assert "8 ranks. Bytes are per rank" in written
        assert "on rank 0 alone" in written


class TestCommand:
    def test_it_writes_a_file_and_says_which(self, penstock_command: Callable[..., Any], folder: Path) -> None:
        pytest.importorskip("plotly")
        done = penstock_command("report", str(folder), "--out", "page.html")
        assert (done.exit_code, done.out, done.err) == (0, "page.html: open it in a browser\n", "")
        written = Path("page.html").read_text()
        assert "Plotly" in written
        assert list(Path().iterdir()) == [Path("page.html")]

    def test_without_plotly_it_says_what_to_install(
        self, penstock_command: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pages, "find_spec", lambda name: None)
        done = penstock_command("report", str(folder))
        assert done.exit_code == 2
        assert done.err.count("\n") == 1
        assert "Install it with: pip install 'penstock[train]'" in done.err
