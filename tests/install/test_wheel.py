"""Installed where nothing compiles, a wheel trains and loads little; a build from source says what is missing."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINS = """
import sys, torch
before = {*sys.modules}
import penstock
penstock.prepare
print(penstock.__file__)
print(*{*sys.modules} - before)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
placement = penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path=".")
optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, max_grad_norm=1.0)
values = optimizer.full_param(model[0].weight).clone()
def step():
    optimizer.backward(model(torch.ones(4, 32)).square().mean())
    assert not optimizer.step().skipped
    optimizer.zero_grad()
step()
assert not torch.equal(optimizer.full_param(model[0].weight), values)
optimizer.save("saved")
print(*sys.modules)
with optimizer.trace("trace.json"):
    step()
print(*sys.modules)
optimizer.close()
for name in penstock.__all__:
    getattr(penstock, name)
print(*sys.modules)
"""
NOT_FOR_TRAINING = {"transformers", "rich", "typer", "tensorboard", "safetensors", "datasets", "tokenizers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this source. The build goes on from the one that the tests run with, so little is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([*command, str(ROOT)], check=True, env=environment)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell that finds no compiler."""
    tools = tmp_path_factory.mktemp("tools")
    for name in ("env", "sh", "uname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CC", "CXX", "PYTHON"))}
    return kept | {"PATH": str(tools), "OMP_NUM_THREADS": "1"}


def test_a_wheel_trains_where_nothing_compiles_and_loads_little(
    wheel: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    """Little beside torch, counted in modules, and nothing of `penstock.ext` that was not asked for."""
    storage = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(storage)], check=True)
    python = storage / "bin" / "python"
    (packages,) = (storage / "lib").glob("python*/site-packages")
    # torch and the other libraries are those of the tests: nothing is fetched.
    borrowed = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=bare)
    run = tmp_path / "run"
    run.mkdir()
    done = subprocess.run([python, "-c", TRAINS], cwd=run, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file, *modules = done.stdout.splitlines()
    assert Path(file).is_relative_to(packages)
    added, of_a_run, traced, of_all_names = ({*line.split()} for line in modules)
    assert "penstock.preparing" in added
    assert len({name for name in added if not name.startswith("penstock")}) <= 12  # 7
    assert len(added) <= 240  # 232
    assert not {name for name in of_a_run if name.startswith("penstock.ext")}
    assert "penstock.ext.observe.trace" in traced
    assert "penstock.ext.observe.record" not in traced, "each output by itself"
    assert not {name.split(".")[0] for name in of_all_names} & NOT_FOR_TRAINING
    command = [storage / "bin" / "penstock", "--version"]
    said = subprocess.run(command, cwd=run, env=bare, capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == wheel.name.split("-")[1]


def test_a_wheel_has_the_package_its_types_and_the_licences_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"penstock/py.typed", "penstock/_native.pyi", "penstock/planner/machines/gpus/rtx4090.json"} <= set(names)
    assert [Path(name).name for name in names if "/licenses/" in name] == ["LICENSE", "nanobind.txt", "robin-map.txt"]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"penstock"}


def test_building_from_source_without_a_compiler_says_so_in_one_line(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    command.append(str(ROOT))
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = {line.strip() for line in done.stderr.splitlines() if "penstock:" in line}
    assert line.startswith("penstock: building from source needs a C++ compiler (Debian, Ubuntu: apt install g++;")
    assert "CMake" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
