"""Pages in a real browser: no script fails, every chart has marks, and no name of data becomes markup."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Placement
from penstock.cli.reporting.page import write_page
from tests.browser import BROWSER, assert_drawn, open_page
from tests.lib.ranks import run_ranks
from tests.unit.cli.page.runs import CURVES, FOLDER_NAME, HOSTILE, record_loop, record_on_rank, write_plan

pytest.importorskip("plotly")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")  # before anything is trained


def test_two_ranks_with_files_and_hostile_names(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER_NAME
    run_ranks(record_on_rank, 2, str(folder))
    write_plan(folder)
    drawn = open_page(write_page([folder], tmp_path / "page.html"), tmp_path / "profile")
    assert_drawn(drawn, charts=CURVES | {"plan-0", "own-0"})
    assert not {"img", "a"} & drawn.tags.keys()
    assert drawn.tags["script"] == 3
    assert "2 ranks. Bytes are per rank" in drawn.text
    for text in (*HOSTILE, FOLDER_NAME):
        assert text in drawn.text


def test_a_run_of_the_command(penstock_command: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    options = ["--max_steps", "8", "--logging_steps", "2", "--per_device_train_batch_size", "2", "--max_length", "32"]
    assert penstock_command("train", *options, "--eval_strategy", "no", "--out", "run").exit_code == 0
    drawn = open_page(Path("run/report.html"), tmp_path / "profile")
    assert_drawn(drawn, charts=CURVES)
    assert "img" not in drawn.tags


def test_two_loops_side_by_side(tmp_path: Path) -> None:
    record_loop(tmp_path / "a", Placement(params="cpu", optimizer="cpu"))
    record_loop(tmp_path / "b", Placement(), steps=1, hostile=False)  # a curve of one point, and no trace
    drawn = open_page(write_page([tmp_path / "a", tmp_path / "b"]), tmp_path / "profile")
    assert_drawn(drawn, charts={"loss", "memory-0", "memory-1", "placement-1"})
