"""Rows of one file, or the error of reading it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.training.data.reading.rows import Row, rows_of
from penstock.cli.training.data.reading.sources import Source
from penstock.errors import ConfigError


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Row]]:
    """Read the rows of files in the current folder, which is empty at first."""
    monkeypatch.chdir(tmp_path)

    def rows(*names: str, text_field: str = "text") -> list[Row]:
        return list(rows_of(Source("all", None, tuple(map(Path, names)), None), text_field=text_field))

    return rows


@pytest.fixture
def error_of(read: Callable[..., list[Row]]) -> Callable[..., str]:
    """The line that refuses a file of this name and content."""

    def error(name: str, content: bytes | None = None) -> str:
        if content is not None:
            Path(name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            read(name)
        assert str(caught.value).isprintable()
        return str(caught.value)

    return error
