"""Tests in the strict process are ordinary items of the session: with a stub in the place of the device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
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

import pytest

from tests.device.elsewhere import Elsewhere
from tests.device.loading import HERE


def pytest_configure(config):
    if not os.environ.get(HERE):
        folder = Path(__file__).parent / "device"
        config.pluginmanager.register(Elsewhere(config, folder, backend="stub", library=lambda: None))


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ and not os.environ.get(HERE):
        about = {name: getattr(report, name) for name in ("nodeid", "when", "outcome", "duration", "sections")}
        with open(Path(__file__).parent / "reports.json", "a") as file:
            print(json.dumps(about | {"text": report.longreprtext}), file=file)
"""
SETTINGS = """
[pytest]
pythonpath = .
timeout = 60
addopts = --strict-markers --import-mode=importlib -ra -m "not thorough" -p no:hypothesispytest
markers = thorough
xfail_strict = true
"""
STUB = "print('what the stub prints when it is imported')\n"


@dataclass
class Run:
    """One session of pytest: the reports that it logged, and what it wrote."""

    reports: list[dict[str, Any]]
    text: str
    counts: str

    def of(self, name: str) -> dict[str, Any]:
        """The reports of an item, by phase."""
        return {report["when"]: report for report in self.reports if report["nodeid"].endswith(f"::{name}")}

    def ended(self, name: str) -> dict[str, str]:
        return {when: report["outcome"] for when, report in self.of(name).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs pytest on files below `device/` and beside it."""

    def run(files: dict[str, str], *args: str, folder: Path | None = None, **environment: str) -> Run:
        folder = folder or tmp_path_factory.mktemp("sandbox")
        for name, text in {"conftest.py": CONFTEST, "pytest.ini": SETTINGS, "stub.py": STUB, **files}.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text)
        Path(folder, "reports.json").write_text("")
        unset = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", HERE)
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *args],
            cwd=folder,
            env={**inherited, "PYTHONPATH": f"{REPOSITORY}:{folder}", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        reports = [json.loads(line) for line in Path(folder, "reports.json").read_text().splitlines()]
        return Run(reports, done.stdout + done.stderr, done.stdout.splitlines()[-1].strip("= "))

    return run


EVERYTHING = """
import ctypes
import os
import sys
import time
import warnings

import pytest

MADE = []


@pytest.fixture(scope="module")
def made():
    MADE.append(os.getpid())
    print("made")
    yield MADE
    print("torn down")


def test_passes(made):
    assert "stub" in sys.modules

def test_keeps_the_fixture(made):
    assert len(made) == 1
    time.sleep(0.2)

def test_fails():
    print("said before")
    print("said aloud", file=sys.stderr)
    here, there = [1, 2, 3], [1, 2, 4]
    assert here == there

@pytest.mark.skip(reason="not today")
def test_skipped(): ...

@pytest.mark.xfail(reason="known")
def test_known(): assert False

@pytest.mark.xfail(reason="no longer")
def test_no_longer(): ...

@pytest.mark.parametrize("value", ["a-b[c]", "d e/f", "\\u00e9"])
def test_values(value): assert value != "d e/f"

def test_warns(): warnings.warn("careful")

@pytest.mark.thorough
def test_left_out(): assert False

def test_aborts():
    os.write(1, b"said by C\\n")
    os.write(2, b"why it aborts\\n")
    os.abort()

def test_after_an_abort(made):
    assert len(made) == 1

def test_reads_nothing(capfd):
    ctypes.string_at(0)

def test_exits():
    os._exit(7)

@pytest.fixture
def crashing_end():
    yield
    os.abort()

def test_crashes_at_its_end(crashing_end): ...

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(100)

def test_files(tmp_path, capfd):
    os.write(1, b"x")
    assert capfd.readouterr().out == "x"

def test_is_last(made): ...
"""
BESIDE = """
import os
import sys

def test_beside():
    assert "stub" not in sys.modules
"""


@pytest.fixture(scope="module")
def everything(run: Callable[..., Run]) -> Run:
    return run({"device/test_all.py": EVERYTHING, "test_beside.py": BESIDE}, "--durations=1")


def test_outcomes(everything: Run) -> None:
    passed = dict.fromkeys(("setup", "call", "teardown"), "passed")
    for name in (
        "passes",
        "keeps_the_fixture",
        "values[a-b[c]]",
        "warns",
        "after_an_abort",
        "files",
        "is_last",
        "beside",
    ):
        assert everything.ended(f"test_{name}") == passed, name
    for name in ("fails", "values[d e/f]", "no_longer"):
        assert everything.ended(f"test_{name}") == passed | {"call": "failed"}, name
    assert everything.ended("test_skipped") == {"setup": "skipped", "teardown": "passed"}
    assert everything.ended("test_known") == passed | {"call": "skipped"}
    assert everything.ended("test_left_out") == {}
    assert everything.counts.startswith("7 failed, 10 passed, 1 skipped, 1 deselected, 1 xfailed, 1 warning, 1 error")


def test_what_is_shown(everything: Run) -> None:
    assert "assert [1, 2, 3] == [1, 2, 4]" in everything.text
    assert "At index 2 diff: 3 != 4" in everything.text
    assert "SKIPPED [1] device/test_all.py:" in everything.text
    assert "not today" in everything.text
    assert "UserWarning: careful" in everything.text
    assert "Captured stdout" in everything.text
    assert everything.of("test_keeps_the_fixture")["call"]["duration"] >= 0.2
    assert "call     device/test_all.py::test_hangs" in everything.text


def test_captured_output(everything: Run) -> None:
    segments = [["Captured stdout call", "said before\n"], ["Captured stderr call", "said aloud\n"]]
    assert everything.of("test_fails")["call"]["sections"] == segments
    assert everything.of("test_passes")["setup"]["sections"] == [["Captured stdout setup", "made\n"]]
    assert ["Captured stdout teardown", "torn down\n"] in everything.of("test_is_last")["teardown"]["sections"]


@pytest.mark.parametrize(
    ("name", "how", "where"),
    [
        ("aborts", "died of SIGABRT", "in test_aborts"),
        ("reads_nothing", "died of SIGSEGV", "in string_at"),
        ("exits", "ended with exit code 7", ""),
        ("hangs", "was stopped after 1 s", "in test_hangs"),
    ],
)
def test_crashes_are_failures(everything: Run, name: str, how: str, where: str) -> None:
    assert everything.ended(f"test_{name}") == {"setup": "passed", "call": "failed"}
    text = everything.of(f"test_{name}")["call"]["text"]
    assert text.splitlines()[0] == f"the strict process {how}"
    assert where in text


def test_a_crash_shows_what_was_written(everything: Run) -> None:
    report = everything.of("test_aborts")["call"]
    assert "why it aborts\nFatal Python error: Aborted" in report["text"]
    assert report["sections"] == [["Captured stdout call", "said by C\n"]]
    assert "why it aborts" not in everything.of("test_reads_nothing")["call"]["text"]


def test_a_crash_at_the_end_is_an_error(everything: Run) -> None:
    expected = {"setup": "passed", "call": "passed", "teardown": "failed"}
    assert everything.ended("test_crashes_at_its_end") == expected


SMALL = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number):
    print(f"number {number} in {os.getpid()}")
    assert number != 2
"""


def test_selection(run: Callable[..., Run], tmp_path: Path) -> None:
    files = {"device/test_small.py": SMALL}
    assert run(files, "-x", folder=tmp_path).counts.startswith("1 failed, 2 passed in")
    assert run(files, "--lf", folder=tmp_path).counts.startswith("1 failed in")


def test_one_item_with_its_output(run: Callable[..., Run]) -> None:
    done = run({"device/test_small.py": SMALL}, "-s", "device/test_small.py::test_number[4]")
    assert "number 4 in" in done.text
    assert done.counts.startswith("1 passed in")


def test_two_xdist_workers(run: Callable[..., Run]) -> None:
    files = {"device/test_small.py": SMALL, "test_beside.py": BESIDE}
    done = run(files, "-n", "2", "--dist", "worksteal", "--timeout=30")
    assert done.counts.startswith("1 failed, 6 passed in")
    assert done.ended("test_number[2]") == {"setup": "passed", "call": "failed", "teardown": "passed"}


def test_in_this_process(run: Callable[..., Run]) -> None:
    assert run({"device/test_beside.py": BESIDE}, **{HERE: "1"}).counts.startswith("1 passed in")


PACKAGE = """
import sys
import pytest

@pytest.fixture(scope="package", autouse=True)
def around():
    yield
    assert "stub" in sys.modules, "the end of the package in the ordinary process"
"""


def test_a_package_left_by_way_of_the_device_is_torn_down(run: Callable[..., Run]) -> None:
    """Its fixture, made for an item before, is still up when an item of the device is the last of the package."""
    files = {
        "conftest.py": CONFTEST.replace('"device"', '"package/device"'),
        "package/__init__.py": "",
        "package/conftest.py": PACKAGE,
        "package/test_one.py": "def test_one(): ...\n",
        "package/device/__init__.py": "",
        "package/device/test_two.py": "def test_two(): ...\n",
        "test_three.py": "def test_three(): ...\n",
    }
    done = run(files, "package/test_one.py", "package/device", "test_three.py")
    assert done.ended("test_one") == dict.fromkeys(("setup", "call", "teardown"), "passed")
    assert done.ended("test_two") == {"setup": "passed", "call": "passed", "teardown": "failed"}
    assert done.counts.startswith("3 passed, 1 error in")


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        ("raise ValueError('no such device')\n", "ValueError: no such device"),
        ("import os; os.abort()\n", "died of SIGABRT"),
    ],
)
def test_a_process_that_does_not_start(run: Callable[..., Run], stub: str, reason: str) -> None:
    done = run({"device/test_small.py": SMALL, "stub.py": stub}, "-k", "0 or 1")
    assert done.counts.startswith("4 deselected, 2 errors in")
    assert reason in done.of("test_number[0]")["setup"]["text"]
    assert reason in done.of("test_number[1]")["setup"]["text"]


def test_a_module_that_is_broken_there_alone(run: Callable[..., Run]) -> None:
    text = "import sys\nassert 'stub' not in sys.modules, 'only there'\ndef test_one(): ...\n"
    done = run({"device/test_broken.py": text, "device/test_small.py": SMALL})
    assert "only there" in done.of("test_one")["setup"]["text"]
    assert done.counts.startswith("1 failed, 5 passed, 1 error in")
