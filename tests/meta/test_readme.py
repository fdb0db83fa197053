"""The README is true, and so is the code of the pages: it runs, its commands and its files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import sampled

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = "".join(
    (ROOT / "docs" / page).read_text()
    for page in ("placement.md", "overlap.md", "loops.md", "inference.md", "nvme.md", "report.md")
)


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


@pytest.mark.parametrize("snippet", [*snippets(README), *sampled(snippets(PAGES), every=6)])
def test_snippet_runs(snippet, tmp_path):
    for optional in ("peft", "transformers"):
        if f"from {optional}" in snippet:
            pytest.importorskip(optional)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_options_of_the_commands_exist():
    pytest.importorskip("transformers")
    help_text = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "PATH": ""},
    ).stdout
    for line in re.findall(r"penstock train.*", README):
        for option in re.findall(r"(--[a-z-]+)", line.split("penstock train")[1]):
            assert option in help_text, option


def test_files_of_the_tree_exist():
    tree = README.split("## Where things are")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            folder = ROOT
        for name in names:
            assert (folder / name).exists() or (ROOT / name).exists(), name
        if line.startswith("src/penstock/"):
            folder = ROOT / "src" / "penstock"


def test_the_tree_has_every_file_and_folder_of_the_package():
    tree = README.split("## Where things are")[1].split("```")[1]
    for path in (ROOT / "src" / "penstock").iterdir():
        if not path.name.startswith("_") and path.suffix in ("", ".py"):
            assert path.name in tree, path.name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
