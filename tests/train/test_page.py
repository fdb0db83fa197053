"""docs/train.md is the command's: its options with their defaults, the names of 0.2, the exit statuses, its files."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.train.arguments import PenstockArguments, make_parser, parse
from penstock.train.run_file import OTHERWISE, RENAMED, advice_for, read_run_file
from tests.docs.blocks import blocks_of

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text()


def rows_of(heading: str) -> dict[str, list[str]]:
    """The tables below a heading, up to the next one: the cells of each row by the name that it begins with."""
    section = re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {first.strip("`"): rest for first, *rest in lines if "---" not in first}


def test_every_field_of_ours_is_in_the_tables_with_its_default() -> None:
    told = rows_of("Where state lives") | rows_of("Short names, and Penstock's own")
    for each in fields(PenstockArguments):
        default = told[f"--{each.name}"][0]
        if isinstance(each.default, (str, int)) and not isinstance(each.default, bool):
            assert default == f"`{each.default}`", each.name
        else:
            assert "`" not in default, each.name
    known = make_parser()._option_string_actions
    assert {name for name in told if name.startswith("--")} <= set(known)


def test_names_of_02_are_on_the_page() -> None:
    """Two names and what takes their place in a row; names of one place together, of `--options` too."""
    rows = [[first, *rest] for first, rest in rows_of("Coming from 0.2").items()]
    told = {
        name: instead
        for row in rows
        for names, instead in zip(row[::2], row[1::2], strict=True)
        for name in names.replace("`", "").split(", ")
    }
    for name in {*RENAMED, *OTHERWISE}:
        advice = advice_for(name)
        assert advice is not None
        assert told[f"--{name.replace('_', '-')}"].replace("`", "") == advice.replace(f"{name}=", "NAME=")


def test_the_file_of_the_page_is_read(tmp_path: Path) -> None:
    (block,) = [block for block in blocks_of("docs/train.md") if block.kind == "yaml"]
    (tmp_path / "sft.yaml").write_text(block.text)
    assert read_run_file(tmp_path / "sft.yaml")["params"] == "cpu"
    request = parse(["--config", str(tmp_path / "sft.yaml"), "--use_cpu", "true", "--bf16", "false"])
    assert request.penstock.to_placement().optimizer == {"device": 0.5, "cpu": 0.5}
    assert request.penstock.to_options().tile_bytes == 4 << 20
    assert request.training.assistant_only_loss


@pytest.mark.parametrize("status", ["0", "2", "75", "130, 143", "1"])
def test_the_statuses_are_on_the_page(status: str) -> None:
    assert status in rows_of("Exit status")
