"""docs/train.md says of every option under which heading it is and what its default is, and lists the statuses."""

import re
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.options import about_of, option_of
from penstock.cli.training.config import TrainConfig

DOCS = Path(__file__).parents[3] / "docs" / "train.md"
FIRST = "What is run"


def default_of(each: Field[Any]) -> str:
    """A default as the page writes it: words for what is worked out, code for what could be typed."""
    about, default = about_of(each), each.default
    if about.default_help is not None:
        return re.sub(r"--[a-z-]+|OUT/\w+", r"`\g<0>`", about.default_help)
    if default is None:
        return "the library's" if about.panel and about.panel.startswith("Where state lives") else ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`" if default not in ((), "") else ""


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)^## ", DOCS.read_text(), re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]


def rows(text: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if not row[0].startswith(("---", "option", "status"))]


def test_every_option_is_in_the_table_of_its_heading_with_its_default() -> None:
    headings = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", section("Options"), re.MULTILINE | re.DOTALL))
    wanted: dict[str, dict[str, str]] = {FIRST: {"`--config`": ""}}
    for each in fields(TrainConfig):
        heading = wanted.setdefault(about_of(each).panel or FIRST, {})
        heading[f"`{option_of(each.name)}`"] = default_of(each)
    assert {name: {row[0]: row[1] for row in rows(text)} for name, text in headings.items()} == wanted
    assert all(row[2] for text in headings.values() for row in rows(text))


def test_names_of_before_are_on_the_page() -> None:
    for each in fields(TrainConfig):
        for written in about_of(each).before:
            old, _, value = written.partition("=")
            assert f"`{old}` is `{f'{option_of(each.name)} {value}'.strip()}`" in " ".join(section("Options").split())


def test_the_statuses_are_those_of_the_page(penstock_command: Callable[..., Any], monkeypatch: Any) -> None:
    from penstock.cli.training.interruption import EXIT_INTERRUPTED

    ends: dict[int, Any] = {0: True, EXIT_INTERRUPTED: False, 130: KeyboardInterrupt()}

    def run(config: TrainConfig, interruption: object) -> bool:
        if isinstance(end, BaseException):
            raise end
        return bool(end)

    monkeypatch.setattr("penstock.cli.training.run.run", run)
    for status, end in ends.items():  # noqa: B007 (`run` reads it)
        assert penstock_command("train").exit_code == status
    assert penstock_command("train", "--lr", "-1").exit_code == 2
    end = ZeroDivisionError()  # python's own ending is status 1
    with pytest.raises(ZeroDivisionError):
        penstock_command("train")
    named = {int(status) for row in rows(section("Exit status")) for status in row[0].split(",")}
    assert named == {*ends, 1, 2, 143}


def test_the_example_of_a_file_is_read(tmp_path: Path) -> None:
    from penstock.cli.keys import values_in
    from penstock.cli.options import options_of

    example = re.search(r"```yaml\n(.*?)```", section("A run is a file"), re.DOTALL)
    assert example is not None
    (tmp_path / "run.yaml").write_text(example[1])
    assert TrainConfig(**values_in(tmp_path / "run.yaml", options_of(TrainConfig))).packing == "on"
