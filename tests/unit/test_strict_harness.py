"""Tests in the strict process are ordinary items of the session: with a stub in the place of the device."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.device.building import REPOSITORY
from tests.device.loading import HERE

CONFTEST = """
import json
import os
from pathlib import Path

from tests.device.elsewhere import Elsewhere
from tests.device.loading import HERE


def pytest_configure(config):
    if not os.environ.get(HERE):
        folder = Path(__file__).parent / "device"
        config.pluginmanager.register(Elsewhere(config, folder, backend="stub", library=lambda: None))


def pytest_runtest_logreport(report):
    if not os.environ.get(HERE):
        about = {name: getattr(report, name) for name in ("nodeid", "when", "outcome")}
        with open(Path(__file__).parent / "reports.json", "a") as file:
            print(json.dumps(about | {"text": report.longreprtext}), file=file)
"""
SETTINGS = """
[pytest]
pythonpath = .
timeout = 60
addopts = --strict-markers --import-mode=importlib -ra -p no:hypothesispytest
xfail_strict = true
"""
STUB = "print('what the stub prints when it is imported')\n"


@dataclass
class Run:
    """One session of pytest: the reports that it logged, and its last line."""

    reports: list[dict[str, Any]]
    counts: str

    def of(self, name: str) -> dict[str, Any]:
        """The reports of an item, by phase."""
        return {report["when"]: report for report in self.reports if report["nodeid"].endswith(f"::{name}")}

    def ended(self, name: str) -> dict[str, str]:
        return {when: report["outcome"] for when, report in self.of(name).items()}


def run(folder: Path, files: dict[str, str]) -> Run:
    """Run pytest on files below `device/` and beside it."""
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": SETTINGS, "stub.py": STUB, **files}.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(text)
    unset = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", HERE)
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-m", "pytest"],
        cwd=folder,
        env={**inherited, "PYTHONPATH": f"{REPOSITORY}:{folder}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    reports = [json.loads(line) for line in Path(folder, "reports.json").read_text().splitlines()]
    return Run(reports, done.stdout.splitlines()[-1].strip("= "))


EVERYTHING = """
import os
import sys
import time

import pytest


@pytest.fixture(scope="module")
def made():
    return []

def test_passes(made):
    assert "stub" in sys.modules
    made.append(1)

def test_keeps_the_fixture(made):
    assert made == [1]

def test_fails():
    assert [1, 2, 3] == [1, 2, 4]

def test_aborts():
    os.write(2, b"why it aborts\\n")
    os.abort()

def test_after_an_abort(made):
    assert made == []

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(100)

def test_is_last(): ...
"""
BESIDE = """
import sys

def test_beside():
    assert "stub" not in sys.modules
"""
BROKEN_THERE = """
import sys

assert "stub" not in sys.modules, "only there"

def test_broken(): ...
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    files = {"device/test_all.py": EVERYTHING, "device/test_broken.py": BROKEN_THERE, "test_beside.py": BESIDE}
    return run(tmp_path_factory.mktemp("sandbox"), files)


def test_outcomes(everything: Run) -> None:
    passed = dict.fromkeys(("setup", "call", "teardown"), "passed")
    for name in ("passes", "keeps_the_fixture", "after_an_abort", "is_last", "beside"):
        assert everything.ended(f"test_{name}") == passed, name
    assert everything.ended("test_fails") == passed | {"call": "failed"}
    assert everything.ended("test_broken")["setup"] == "failed"
    assert "only there" in everything.of("test_broken")["setup"]["text"]
    assert everything.counts.startswith("3 failed, 5 passed, 1 error")


@pytest.mark.parametrize(
    ("name", "how", "where"),
    [
        ("aborts", "died of SIGABRT", "why it aborts\nFatal Python error: Aborted"),
        ("hangs", "was stopped after 1 s", "in test_hangs"),
    ],
)
def test_crashes_are_failures(everything: Run, name: str, how: str, where: str) -> None:
    assert everything.ended(f"test_{name}") == {"setup": "passed", "call": "failed"}
    text = everything.of(f"test_{name}")["call"]["text"]
    assert text.splitlines()[0] == f"the strict process {how}"
    assert where in text
