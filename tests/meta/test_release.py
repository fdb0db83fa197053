"""A release: its version is in one place, its files agree, and `make help` lists what there is to make."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import penstock

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_changelog_and_the_citation() -> None:
    assert "version" in PROJECT["dynamic"]  # read from the package, by the build
    changelog = re.search(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert changelog is not None
    assert citation is not None
    assert changelog[1] == citation[1] == penstock.__version__


def test_every_licence_of_what_is_compiled_in_is_named() -> None:
    named = (ROOT / "licenses" / "README.md").read_text()
    texts = [path.name for path in (ROOT / "licenses").glob("*.txt")]
    assert sorted(texts) == ["nanobind.txt", "robin-map.txt"]
    assert all(f"({name})" in named for name in texts)


def test_make_help_lists_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    # Without the flags of a make that runs the tests: it would say which folder it enters.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(["make", "help"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    assert [line.split()[1] for line in said.splitlines()] == targets[1].split()
    assert all(len(line.split()) > 2 for line in said.splitlines())


def test_a_bug_report_asks_for_the_doctor() -> None:
    asked = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert "penstock doctor --json" in asked


def test_train_brings_what_its_page_needs() -> None:
    """`penstock report` asked for another extra after `pip install 'penstock[train]'`."""
    extras = PROJECT["optional-dependencies"]
    assert set(extras["report"]) <= set(extras["train"])
