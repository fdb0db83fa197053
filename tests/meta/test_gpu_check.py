"""The check for GPUs on a cpu: rows as they come, whatever hangs, crashes or is killed."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.lib.processes import children as children_of
from tests.lib.processes import lives

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHECK = [sys.executable, str(BENCHMARKS / "gpu_check.py")]
ITEMS = """
import os, signal, subprocess, sys, time
from journal import Journal

def item(name):
    if name == "hangs":
        time.sleep(60)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "leaves somebody":
        open(os.environ["STARTED"], "w").write(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    if name == "raises":
        raise RuntimeError("no such thing")
    return {"number": 7, "wrong": "not 8" if name == "wrong" else ""}

journal = Journal()
if "refuses" in sys.argv:
    sys.exit("nothing to do")
for name in sys.argv[1:]:
    journal.take(name, lambda: item(name))
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("parts")


def run_items(parts: ModuleType, folder: Path, *names: str, seconds: float, item_seconds: float = 20.0) -> list[Any]:
    """Two parts with the same share: one with these items, and one that is fine."""
    given = [
        parts.Part(title, "", [sys.executable, "-X", "faulthandler", "-c", ITEMS, *items], share=0.5)
        for title, items in (("first", names), ("second", ["fine"]))
    ]
    reports = []
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "STARTED": str(folder / "started")}

    def changed(entries: list[Any]) -> None:
        parts.write_report(folder / "report.json", {"parts": [entry.__dict__ for entry in entries]})
        reports.append(json.loads((folder / "report.json").read_text()))

    entries = parts.run_parts(
        given, seconds=seconds, item_seconds=item_seconds, environment=environment, changed=changed
    )
    assert reports[-1]["parts"][0]["rows"] == entries[0].rows
    assert [path.name for path in folder.iterdir() if path.name != "started"] == ["report.json"]
    return entries


def statuses(entry: Any) -> dict[str, str]:
    return {row["name"]: row["status"] for row in entry.rows}


def test_what_crashes_hangs_or_is_wrong_is_a_row_and_the_next_item_runs(parts: ModuleType, tmp_path: Path) -> None:
    names = ["fine", "crashes", "wrong", "hangs", "last"]
    first, second = run_items(parts, tmp_path, *names, seconds=120, item_seconds=2)
    assert statuses(first) == {
        "fine": "passed",
        "crashes": "crashed",
        "wrong": "failed",
        "hangs": "hung",
        "last": "passed",
    }
    reasons = {row["name"]: row["reason"] for row in first.rows}
    assert "SIGSEGV" in reasons["crashes"]
    assert "line 7 in item" in reasons["hangs"], "where it hangs"
    assert reasons["wrong"] == "not 8"
    assert first.rows[0]["number"] == 7
    assert (first.under_way, first.counts) == ("", {"passed": 2, "crashed": 1, "failed": 1, "hung": 1})
    assert (first.status, second.status) == ("done", "done")


def test_a_part_over_its_budget_is_ended_with_all_it_started(parts: ModuleType, tmp_path: Path) -> None:
    first, second = run_items(parts, tmp_path, "fine", "leaves somebody", "never", seconds=6)
    assert first.status == "over its budget"
    assert statuses(first) == {"fine": "passed", "leaves somebody": "over its budget"}
    assert (second.status, statuses(second)) == ("done", {"fine": "passed"})
    assert not lives(int((tmp_path / "started").read_text()))


def test_a_part_that_cannot_start_says_why_and_one_without_time_is_skipped(parts: ModuleType, tmp_path: Path) -> None:
    first, second = run_items(parts, tmp_path, "refuses", seconds=60)
    assert (first.status, second.status) == ("failed", "done")
    assert "nothing to do" in first.reason
    first, second = run_items(parts, tmp_path, "fine", seconds=0.5)
    assert (first.status, second.status) == ("skipped", "skipped")


def test_an_error_of_an_item_is_its_row(parts: ModuleType, tmp_path: Path) -> None:
    first, _ = run_items(parts, tmp_path, "raises", "fine", seconds=120)
    assert statuses(first) == {"raises": "failed", "fine": "passed"}
    assert first.rows[0]["reason"] == "RuntimeError: no such thing"


def test_the_check_runs_on_a_cpu_within_a_small_budget(tmp_path: Path) -> None:
    chosen = ["--parts", "pinning,movement", "--pytest=-k", "--pytest=waits_for_nothing or forgets_it"]
    command = [*CHECK, "--out", str(tmp_path), "--budget-seconds", "100", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check-cpu.json").read_text())
    assert report["machine"]["cores"] >= 1
    pinning, transfers = report["parts"]
    assert (pinning["status"], transfers["status"]) == ("done", "done")
    assert {row["name"] for row in pinning["rows"]} >= {"slab", "bandwidth", "a run gives back"}
    assert sorted(row["status"] for row in transfers["rows"]) == ["passed", "skipped"]
    assert "nothing is registered for this device" in transfers["rows"][-1]["reason"]
    assert "movement" in done.stdout.splitlines()[-2]


def test_a_check_that_is_killed_leaves_a_whole_report_and_nobody_behind(tmp_path: Path) -> None:
    """At every moment the file is whole; after a SIGKILL, too, and what was under way ends."""
    out = tmp_path / "report.json"
    process = subprocess.Popen([*CHECK, "--out", str(out), "--parts", "pinning,parity"], stdout=subprocess.DEVNULL)
    try:
        rows = 0
        while rows < 2:
            assert process.poll() is None
            if out.exists():
                rows = sum(len(part["rows"]) for part in json.loads(out.read_text())["parts"])
        while not (children := children_of(process.pid)):  # between two parts
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    report = json.loads(out.read_text())
    assert report["parts"][-1]["status"] in ("waiting", "running")
    assert sum(len(part["rows"]) for part in report["parts"]) >= 2
    while any(map(lives, children)):
        time.sleep(0.05)


def test_a_check_that_is_asked_to_end_ends_what_it_started(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    process = subprocess.Popen([*CHECK, "--out", str(out), "--parts", "parity"], stdout=subprocess.DEVNULL)
    while not (children := children_of(process.pid) if out.exists() else []):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert not any(map(lives, children))
    assert json.loads(out.read_text())["parts"]
