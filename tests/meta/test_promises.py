"""`tests/README.md` names tests that are there for each promise of the design page."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUMBERED = re.compile(r"^(\d+)\. ", re.MULTILINE)
ROW = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/.]+\.py)(?:::(\w+))?`")


def numbers_of_the_design_page() -> list[int]:
    section = (ROOT / "docs/design.md").read_text().partition("## Promises and their tests")[2]
    return [int(number) for number in NUMBERED.findall(section)]


def by_promise() -> dict[int, list[tuple[str, str]]]:
    """The files, and the tests in them or nothing, that the README names."""
    text = (ROOT / "tests/README.md").read_text()
    return {int(number): NAMED.findall(named) for number, named in ROW.findall(text)}


def test_every_promise_has_tests_that_are_there() -> None:
    numbers, named = numbers_of_the_design_page(), by_promise()
    assert numbers == [*range(1, len(numbers) + 1)]
    assert list(named) == numbers
    assert all(named.values())
    missing = []
    for file, test in sorted({row for rows in named.values() for row in rows}):
        path = ROOT / "tests" / file
        there = ast.parse(path.read_text()).body if path.is_file() else []
        if not there or (test and test not in {node.name for node in there if isinstance(node, ast.FunctionDef)}):
            missing.append(f"{file}::{test}")
    assert not missing
