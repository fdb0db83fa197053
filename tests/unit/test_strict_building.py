"""The build of the strict device, with sources that take no time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.building import REPOSITORY, BuildError, build

MODULE = """
#include <Python.h>
#include "answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "penstock_strict", nullptr, -1, nullptr, nullptr, nullptr,
                                 nullptr, nullptr};
PyMODINIT_FUNC PyInit_penstock_strict() {
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", answer());
    return module;
}
"""
LOADED = """
import sys
from pathlib import Path
from tests.device.loading import load
load(Path(sys.argv[1]), backend="json")
import penstock_strict
print(penstock_strict.answer)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("int answer();\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\nint answer() { return 41; }\n')
    (folder / "module.cpp").write_text(MODULE)
    return folder


def objects(builds: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in builds.glob("strict-objects/*"))


def test_only_what_changed_is_compiled(sources: Path, tmp_path: Path) -> None:
    builds = tmp_path / "build"
    first = build(sources, builds)
    assert first.name == "penstock_strict.so"
    assert build(sources, builds) == first
    assert objects(builds) == ["answer", "module"]

    (sources / "answer.cpp").write_text('#include "answer.h"\nint answer() { return 42; }\n')
    second = build(sources, builds)
    assert second != first
    assert objects(builds) == ["answer", "answer", "module"]
    (sources / "answer.h").write_text("int answer();  // all include it\n")
    build(sources, builds)
    assert objects(builds) == ["answer", "answer", "answer", "module", "module"]

    loaded = [sys.executable, "-c", LOADED, str(second)]
    assert subprocess.run(loaded, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout == "42\n"


def test_an_error_is_the_compilers(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text("int answer( {\n")
    with pytest.raises(BuildError, match=r"answer\.cpp:1:\d+: error: "):
        build(sources, tmp_path / "build")
    assert objects(tmp_path / "build") == ["module"]  # nothing under the name of the other


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"there is no \*\.cpp in "):
        build(tmp_path, tmp_path / "build")


@pytest.mark.thorough
def test_two_processes_build_once(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho made >> {tmp_path}/calls\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    code = f"from tests.device.building import *; build(Path({str(sources)!r}), Path({str(tmp_path)!r}))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, env={"CXX": str(compiler), "PATH": os.environ["PATH"]}
        )
        for _ in range(2)
    ]
    assert [process.wait() for process in started] == [0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 3  # two sources and the library
