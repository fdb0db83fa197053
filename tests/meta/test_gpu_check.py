"""The check for GPUs on a cpu: rows as they come, whatever hangs, crashes or is killed."""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.lib.processes import children, lives

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Files say that an item is where it hangs.
ITEMS = """
import os, signal, subprocess, sys, time
from journal import Journal

def item(name):
    if name == "hangs":
        open("started", "x"); time.sleep(600)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "leaves somebody":
        child = subprocess.Popen(["sleep", "600"])
        open("child", "w").write(str(child.pid))
        open("started", "x"); time.sleep(600)
    if name == "raises":
        raise RuntimeError("no such thing")
    return {"number": 7, "wrong": "not 8" if name == "wrong" else ""}

journal = Journal()
if "refuses" in sys.argv:
    sys.exit("nothing to do")
for name in sys.argv[1:]:
    journal.take(name, lambda: item(name))
"""
STANDING = ("hangs", "leaves somebody")
#: The check itself, with parts of such items.
CHECK = f"""
import sys, gpu_check
from parts import Part
command = [sys.executable, "-c", {ITEMS!r}, *"first second third".split(), "leaves somebody"]
gpu_check.make_parts = lambda names, options: [Part("parity", "", command, share=0.5), Part("rules", "", [], share=0.5)]
gpu_check.describe = lambda: {{"accelerator": None}}
sys.exit(gpu_check.main())
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("parts")


def run_items(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str, jump: float = 0.0, **given: float
) -> list[Any]:
    """Two parts with the same share: one with these items, and one that is fine.

    Arguments:
        jump: seconds that the clock jumps once the report has an item that hangs, and the item is there.
    """
    both = [
        parts.Part(title, "", [sys.executable, "-X", "faulthandler", "-c", ITEMS, *items], share=0.5, folder=folder)
        for title, items in (("first", names), ("second", ["fine"]))
    ]
    report, read = folder / "report.json", []

    def changed(entries: list[Any]) -> None:
        parts.write_report(report, {"parts": [entry.__dict__ for entry in entries]})
        read.append(json.loads(report.read_text())["parts"][0])

    def clock() -> float:
        if read and read[-1]["under_way"] in STANDING and (folder / "started").exists():
            jumped.add(jump)
        return time.monotonic() + sum(jumped)

    jumped: set[float] = set()
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    given = {"seconds": 1200.0, "item_seconds": 300.0} | given
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    entries = parts.run_parts(both, **given, environment=environment, changed=changed)
    assert read[-1]["rows"] == entries[0].rows
    assert {path.name for path in folder.iterdir()} <= {"report.json", "started", "child"}
    return entries


def statuses(entry: Any) -> dict[str, str]:
    return {row["name"]: row["status"] for row in entry.rows}


def test_what_crashes_hangs_or_is_wrong_is_a_row_and_the_next_item_runs(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["fine", "crashes", "wrong", "raises", "hangs", "last"]
    first, second = run_items(parts, monkeypatch, tmp_path, *names, jump=400)
    assert statuses(first) == {
        "fine": "passed",
        "crashes": "crashed",
        "wrong": "failed",
        "raises": "failed",
        "hangs": "hung",
        "last": "passed",
    }
    reasons = {row["name"]: row["reason"] for row in first.rows}
    assert "SIGSEGV" in reasons["crashes"]
    assert "line 7 in item" in reasons["hangs"], "where it hangs"
    assert (reasons["wrong"], reasons["raises"]) == ("not 8", "RuntimeError: no such thing")
    assert first.rows[0]["number"] == 7
    assert (first.under_way, first.counts) == ("", {"passed": 2, "crashed": 1, "failed": 2, "hung": 1})
    assert (first.status, second.status) == ("done", "done")


def test_a_part_over_its_budget_is_ended_with_all_it_started(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["fine", "leaves somebody", "never"]
    first, second = run_items(parts, monkeypatch, tmp_path, *names, jump=700, item_seconds=1000)
    assert first.status == "over its budget"
    assert statuses(first) == {"fine": "passed", "leaves somebody": "over its budget"}
    assert (second.status, statuses(second)) == ("done", {"fine": "passed"})
    assert not lives(int((tmp_path / "child").read_text()))


def test_a_part_that_cannot_start_says_why_and_one_without_time_is_skipped(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = run_items(parts, monkeypatch, tmp_path, "refuses")
    assert (first.status, second.status) == ("failed", "done")
    assert "nothing to do" in first.reason
    first, second = run_items(parts, monkeypatch, tmp_path, "fine", seconds=0.5)
    assert (first.status, second.status) == ("skipped", "skipped")


def test_the_check_runs_on_a_cpu(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two tests of its own: `tests/device/test_gpu_suite.py` runs the real ones."""
    check = importlib.import_module("gpu_check")
    assert [file for files in check.TESTS.values() for file in files if not (BENCHMARKS.parent / file).is_file()] == []

    def describe() -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(check.DESCRIBE, {})
        return json.loads(said.getvalue())

    monkeypatch.setattr(check, "describe", describe)  # without a process
    monkeypatch.setattr(parts, "end_on_signals", lambda: None)
    monkeypatch.setattr(check, "TESTS", {"movement": [str(tmp_path / "test_two.py")]})
    tests = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('nothing is there')\ndef test_c(): 1 / 0\n"
    (tmp_path / "test_two.py").write_text(tests)
    limits = ["--budget-seconds", "3000", "--item-seconds", "300"]
    monkeypatch.setattr(
        "sys.argv",
        ["gpu_check.py", "--out", str(tmp_path), "--parts", "movement", *limits, "--pytest=-k", "--pytest=not test_c"],
    )
    assert check.main() == 0
    report = json.loads((tmp_path / "gpu_check-cpu.json").read_text())
    assert report["machine"]["cores"] >= 1
    (movement,) = report["parts"]
    assert movement["status"] == "done"
    assert [row["status"] for row in movement["rows"]] == ["passed", "skipped"]
    assert "nothing is there" in movement["rows"][1]["reason"]
    assert "movement" in capsys.readouterr().out.splitlines()[-2]


def test_the_rows_of_pinned_memory_run_on_a_cpu(
    parts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS / "gpu")
    journal, pinning = importlib.import_module("journal"), importlib.import_module("pinning")
    monkeypatch.setenv(journal.JOURNAL, str(tmp_path / "journal"))
    monkeypatch.setattr("sys.argv", ["pinning.py"])
    pinning.main()
    rows = {line["row"]["name"]: line["row"] for line in journal.read(tmp_path / "journal")[0] if "row" in line}
    assert rows.keys() >= {"slab", "bandwidth", "a run gives back"}
    assert {row["status"] for row in rows.values()} == {"passed"}, rows


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_check_that_is_ended_leaves_a_whole_report_and_nobody_behind(number: signal.Signals, tmp_path: Path) -> None:
    """At every moment the file is whole; and what was under way ends, all of it where the check is asked to end."""
    out = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", CHECK, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=tmp_path)
    try:
        while (
            not (tmp_path / "started").exists() or json.loads(out.read_text())["parts"][0]["under_way"] != STANDING[1]
        ):
            assert process.poll() is None
            time.sleep(0.02)
        (child,) = children(process.pid)
        below = int((tmp_path / "child").read_text())
    finally:
        process.send_signal(number)
        status = process.wait()
    part, waiting = json.loads(out.read_text())["parts"]
    assert (part["status"], len(part["rows"]), waiting["status"]) == ("running", 3, "waiting")
    if number == signal.SIGTERM:
        assert (status, lives(child)) == (128 + number, False)
    else:
        os.kill(below, signal.SIGKILL)
    while lives(child) or lives(below):
        time.sleep(0.02)
