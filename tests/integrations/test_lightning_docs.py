"""The code of docs/lightning.md runs, in the order of the page."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.lightning_cases import PAGE

BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        exec(block, names)
    assert isinstance(names["strategy"], names["PenstockStrategy"])
    for folder in ("step-8", "adversaries/maker", "adversaries/judge"):
        assert (tmp_path / folder / "checkpoint.json").is_file()
