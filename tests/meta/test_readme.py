"""The README is one screen, its links lead somewhere, and the tree of CONTRIBUTING.md is the package's.

Its code and its commands are run by `tests/docs`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TREE = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("```")[1].removeprefix("text")


def test_it_is_a_screen_with_one_example_of_each_kind():
    assert len(README.splitlines()) <= 100
    for example in ("penstock.prepare(", "penstock train ", "trainer_class(", "penstock plan "):
        blocks = re.findall(r"^```\w+\n(.*?)^```", README, re.M | re.S)
        assert sum(example in block for block in blocks) == 1, example
    assert len(re.findall(r"^\| --- ", README, re.M)) == 1, "one measured table"


def test_files_of_the_tree_exist():
    folder = ROOT
    for line in TREE.strip().splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            folder = ROOT
        for name in names:
            assert (folder / name).exists() or (ROOT / name).exists(), name
        if line.startswith("src/penstock/"):
            folder = ROOT / "src" / "penstock"


def test_the_tree_has_every_file_and_folder_of_the_package():
    for path in (ROOT / "src" / "penstock").iterdir():
        if not path.name.startswith("_") and path.suffix in ("", ".py"):
            assert path.name in TREE, path.name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
