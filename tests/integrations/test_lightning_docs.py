"""The code of the page about Lightning runs, in the order of the page."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


def test_the_page_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert isinstance(names["strategy"], names["PenstockStrategy"])
    assert (tmp_path / "step-1" / "checkpoint.json").is_file()
