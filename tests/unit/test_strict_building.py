"""The build of the strict device, with sources that take no time: no library of sources that have changed since."""

import ctypes
from pathlib import Path

import pytest

from tests.device.building import BuildError, build

ANSWER = '#include "answer.h"\nextern "C" int answer() { return 41 + added(); }\n'
ADDED = '#include "answer.h"\nint added() { return ADDED; }\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ADDED 0\nint added();\n")
    (folder / "answer.cpp").write_text(ANSWER)
    (folder / "added.cpp").write_text(ADDED)
    return folder


def objects(builds: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in builds.glob("strict-objects/*"))


def test_only_what_changed_is_compiled(sources: Path, tmp_path: Path) -> None:
    builds = tmp_path / "build"
    first = build(sources, builds)
    assert build(sources, builds) == first
    assert objects(builds) == ["added", "answer"]

    (sources / "answer.cpp").write_text(ANSWER.replace("41", "42"))
    second = build(sources, builds)
    assert objects(builds) == ["added", "answer", "answer"]
    (sources / "answer.h").write_text("#define ADDED 1\nint added();\n")  # all include it
    third = build(sources, builds)
    assert objects(builds) == ["added", "added", "answer", "answer", "answer"]
    assert [ctypes.CDLL(str(library)).answer() for library in (first, second, third)] == [41, 42, 43]


def test_an_error_is_the_compilers(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.cpp").write_text("int answer( {\n")
    with pytest.raises(BuildError, match=r"answer\.cpp:1:\d+: error: "):
        build(sources, tmp_path / "build")
    assert objects(tmp_path / "build") == ["added"]  # nothing under the name of the other
