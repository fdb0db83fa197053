"""What a start waits for, counted in modules: seconds differ between machines, and between hours of one."""

import subprocess
import sys

import pytest


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(['', *sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def of_python() -> set[str]:
    return imported_by("pass")


def test_the_command_line_starts_without_torch(of_python: set[str]) -> None:
    found = imported_by("from penstock.cli import main") - of_python
    assert "penstock.cli.app" in found
    assert not found & {"torch", "numpy", "rich", "transformers", "safetensors", "asyncio"}
    assert len(found) <= 230  # 197 in all, 35 of them ours
    assert sum(name.startswith("penstock") for name in found) <= 45


def test_the_package_is_itself_and_nothing_else(of_python: set[str]) -> None:
    found = imported_by("import penstock") - of_python
    assert "torch" not in found
    assert {name for name in found if name.startswith("penstock")} == {"penstock"}


PROGRAM = """
import sys, tempfile, torch
before = {*sys.modules}
import penstock
penstock.prepare
print(*{*sys.modules} - before)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
placement = penstock.Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path=tempfile.mkdtemp())
optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), placement=placement, max_grad_norm=1.0)
def step():
    optimizer.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
step()
optimizer.save(tempfile.mkdtemp() + "/saved")
print(*sys.modules)
with optimizer.trace(tempfile.mkdtemp() + "/trace.json"):
    step()
print(*sys.modules)
optimizer.close()
for name in penstock.__all__:
    getattr(penstock, name)
print(*sys.modules)
"""
NOT_FOR_TRAINING = {"transformers", "rich", "typer", "tensorboard", "safetensors", "datasets", "tokenizers"}


def test_a_run_loads_little_beside_torch_and_nothing_of_ext_that_it_does_not_ask_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found, run, traced, of_all_names = ({*line.split()} for line in done.stdout.splitlines())
    assert "penstock.preparing" in found
    assert len({name for name in found if not name.startswith("penstock")}) <= 12  # 7
    assert len(found) <= 240  # 232
    assert not {name for name in run if name.startswith("penstock.ext")}
    assert "penstock.ext.observe.trace" in traced
    assert "penstock.ext.observe.record" not in traced, "each output by itself"
    assert not {name.split(".")[0] for name in of_all_names} & NOT_FOR_TRAINING
