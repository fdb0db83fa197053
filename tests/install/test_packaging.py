"""What a build looks for, and which wheels are built of which interpreters."""

import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "packaging"


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executable(path: Path, text: str = "") -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("compiler", ["c++", "g++", "clang++"])
def test_any_compiler_will_do(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (lacks,) = script("backend").missing()
    assert lacks.startswith("a C++ compiler (")
    executable(tmp_path / compiler)
    assert script("backend").missing() == []
    monkeypatch.setenv("CXX", "/opt/bin/odd++ -O2")
    (lacks,) = script("backend").missing()
    assert lacks.startswith("the C++ compiler of CXX (/opt/bin/odd++) (")


def test_headers_are_missed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CXX", str(executable(tmp_path / "c++")))
    backend = script("backend")
    (lacks,) = backend.missing()
    assert lacks.startswith(f"the headers of Python {sysconfig.get_python_version()} (")
    for hook in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        with pytest.raises(SystemExit, match=r"^penstock: building from source needs the headers of Python .*wheel"):
            hook()


def test_one_wheel_for_the_oldest_python_and_one_of_the_stable_abi(tmp_path: Path) -> None:
    there = {"3.10": "cpython", "3.11": "cpython", "3.12": "cpython", "3.13": "cpython", "3.14": "pypy"}
    for version, kind in there.items():
        major, minor = version.split(".")
        executable(tmp_path / f"python{version}", f"""echo '["{kind}", [{major}, {minor}]]'""")
    broken = executable(tmp_path / "python3.15", "exit 127")
    names = [str(tmp_path / f"python{version}") for version in reversed(there)]
    found = script("wheels").interpreters([*names, str(broken), str(tmp_path / "missing")])
    assert found == {(3, 11): str(tmp_path / "python3.11"), (3, 12): str(tmp_path / "python3.12")}
    assert script("wheels").interpreters(names[:2]) == {(3, 13): str(tmp_path / "python3.13")}
