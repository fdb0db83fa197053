"""Tests that run in a process of their own, with something loaded before the C library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_preloaded(source: str, tests: str, tmp_path: Path) -> None:
    """Build a C source of this folder, and run a file of tests with it; all of them pass, and none is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the faults with")
    shim = tmp_path / Path(source).with_suffix(".so")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", HERE / source, "-o", shim, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--basetemp", tmp_path / "inner", HERE / tests],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
