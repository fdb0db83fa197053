"""Tests in the strict process are ordinary items of the session: with a stub in the place of the device."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.device.building import REPOSITORY
from tests.device.loading import HERE

CONFTEST = """
import os
from pathlib import Path

from tests.device.elsewhere import Elsewhere
from tests.device.loading import HERE


def pytest_configure(config):
    if not os.environ.get(HERE):
        folder = Path(__file__).parent / "device"
        config.pluginmanager.register(Elsewhere(config, folder, backend="stub", library=lambda: None))
"""
SETTINGS = """
[pytest]
pythonpath = .
timeout = 60
addopts = --strict-markers --import-mode=importlib -ra -p no:hypothesispytest
xfail_strict = true
"""
STUB = "print('what the stub prints when it is imported')\n"


TESTS = """
import os
import sys

def test_passes():
    assert "stub" in sys.modules

def test_fails():
    assert [1, 2, 3] == [1, 2, 4]

def test_aborts():
    os.write(2, b"why it aborts\\n")
    os.abort()

def test_after_an_abort(): ...
"""
BESIDE = """
import sys

def test_beside():
    assert "stub" not in sys.modules
"""


def test_what_fails_or_ends_there_is_a_failure_here(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "pytest.ini": SETTINGS, "stub.py": STUB, "test_beside.py": BESIDE}
    for name, text in (files | {"device/test_all.py": TESTS}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    unset = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", HERE)
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    there = {**inherited, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    command = [sys.executable, "-m", "pytest", "--junitxml=report.xml"]
    done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].strip("= ").startswith("2 failed, 3 passed")
    cases = ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    failed = {case.get("name"): each.text or "" for case in cases for each in case.iter("failure")}
    assert failed.keys() == {"test_fails", "test_aborts"}
    assert failed["test_aborts"].splitlines()[0] == "the strict process died of SIGABRT"
    assert "why it aborts\nFatal Python error: Aborted" in failed["test_aborts"]
