"""`penstock launch`: what is refused before any library is imported; its runs are with the loops of other libraries."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    (tmp_path / "p.yaml").write_text("stage: 2")
    (tmp_path / "q.yaml").write_text("stages: 2")
    return "script.py"


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate, which it says first")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["script.py"], "--config is missing"),
        (["--config", "p.yaml", "other.py"], "other.py is no file"),
        (["--config", "none.yaml", "script.py"], "none.yaml is not read"),
        (["--config", "q.yaml", "script.py"], "q.yaml has no 'stages'. Did you mean 'stage'?"),
        (["--config", "p.yaml", "--nproc-per-node", "two", "script.py"], "use a number of processes to 1024, or gpu"),
        (["--config", "p.yaml"], "Missing argument 'script'"),
        (["--config", "p.yaml", "-m", "nowhere.at_all", "--config", "x"], "-m nowhere.at_all: there is no module"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, script: str, penstock_command: Callable[..., Any]) -> None:
    pytest.importorskip("yaml")
    outcome = penstock_command("launch", *words)
    assert outcome.exit_code == 2
    assert outcome.err.count("\n") == 1
    assert says in outcome.err


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate, which it says first")
def test_processes_inside_processes_are_refused(
    script: str, penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    monkeypatch.setenv("RANK", "0")
    outcome = penstock_command("launch", "--config", "p.yaml", "--nproc-per-node", "2", script)
    assert outcome.exit_code == 2
    assert "--nproc-per-node inside torchrun: it has started the processes" in outcome.err
