"""What a start waits for, counted in modules; what training loads: `tests/install/test_wheel.py`."""

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
