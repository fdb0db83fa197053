"""What the emulation needs is named before anything is done."""

import shutil
from collections import namedtuple

import pytest

from tests.emulation import building

Usage = namedtuple("Usage", "total used free")


def test_all_that_is_missing_is_named_and_nothing_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "python312", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**10, 10**10 - 1, 1))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(building.MissingError) as caught:
        building.build(tmp_path / "made", packages=True)
    said = str(caught.value)
    for name in ("Python 3.12", "PYTHON312", "4.6 GB, there are 0.0", "CUDA_HOME", "no-compiler"):
        assert name in said
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_not_there_is_asked_for(monkeypatch, tmp_path):
    with pytest.raises(building.MissingError, match="make emulation"):
        building.build(tmp_path / "made", packages=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [12080, 13000])
def test_headers_are_those_of_cuda_13(monkeypatch, tmp_path, version):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert (building.headers() is not None) == (version == 13000)


def test_stubs_leave_out_what_the_sources_have(monkeypatch, tmp_path):
    source = tmp_path / "runtime.cpp"
    source.write_text("API cudaError_t cudaMalloc(void** address, size_t nbytes) {\n")

    def listed(command, **rest):
        symbols = "U cudaMalloc@libcudart\nU cudaGraphLaunch\nU cublasCreate_v2\nU ncclMemFree\nU memcpy\n"
        return type("Done", (), {"stdout": symbols})

    monkeypatch.setattr(building.subprocess, "run", listed)
    found = building.stubs_beside([source], tmp_path)
    assert "cudaMalloc" not in found
    assert "memcpy" not in found
    assert "API long cudaGraphLaunch() {  return 0; }" in found
    assert "API long cublasCreate_v2(void** handle) { *handle = malloc(64); return 0; }" in found
    assert "ncclMemFree" in found
