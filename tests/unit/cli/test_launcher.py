"""A process whose torchrun is gone gets SIGTERM; one that a person started does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.training import launcher

# A launcher that ends as soon as what it has started watches it; that one writes down which signal it got.
LAUNCHED = """
import os, signal, sys, time
from pathlib import Path
if os.fork():
    while not Path({folder!r}, "watches").exists():
        time.sleep(0.01)
    os._exit(0)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("launcher", {source!r})  # by its file: the package would import torch
launcher = module_from_spec(spec)
spec.loader.exec_module(launcher)
def ended(number, frame):
    Path({folder!r}, "got.part").write_text(str(number))
    os.rename(Path({folder!r}, "got.part"), Path({folder!r}, "got"))
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
with launcher.LauncherWatch(look_s=0.05):
    Path({folder!r}, "watches").write_text("")
    time.sleep(1.5)
Path({folder!r}, "got").write_text("nothing")
"""


@pytest.mark.parametrize(
    ("environ", "got"), [({"TORCHELASTIC_RUN_ID": "x"}, str(int(signal.SIGTERM))), ({}, "nothing")]
)
def test_who_outlives_its_launcher(tmp_path: Path, environ: dict[str, str], got: str) -> None:
    program = LAUNCHED.format(source=launcher.__file__, folder=str(tmp_path))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    process = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environ, stderr=subprocess.PIPE, text=True, check=True
    )
    ends = time.monotonic() + 20
    while not (tmp_path / "got").exists():
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert (tmp_path / "got").read_text() == got
    assert ("its launcher, process" in process.stderr) == (got != "nothing")
