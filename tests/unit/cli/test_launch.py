"""`penstock launch` inside torchrun; its mistakes: `test_hostile_options.py`; its runs: with other libraries' loops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_processes_inside_processes_are_refused(
    penstock_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("yaml")
    (tmp_path / "script.py").touch()
    (tmp_path / "p.yaml").write_text("stage: 2")
    monkeypatch.setenv("RANK", "0")
    outcome = penstock_command("launch", "--config", "p.yaml", "--nproc-per-node", "2", "script.py")
    assert outcome.exit_code == 2
    assert "--nproc-per-node inside torchrun: it has started the processes" in outcome.err
