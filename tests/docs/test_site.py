"""`make docs`: the site builds strictly, and is read without a network."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'penstock[docs]'")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'penstock[docs]'")
pytest.importorskip(
    "mkdocstrings_handlers.python", reason="mkdocstrings is not installed: pip install 'penstock[docs]'"
)


def test_it_builds_strictly_and_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test: the site is built once, as `make docs` does it, somewhere else. A warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    assert "-m mkdocs build --strict $(ARGS)" in (ROOT / "Makefile").read_text()
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(site)))
    check_pages(site)
    check_that_nothing_is_loaded_from_elsewhere(site)
    check_search(site)


def check_pages(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file(), page.name
    assert "never changes the result" in (site / "index.html").read_text()
    assert "Shard and place the training state of a model" in (site / "reference" / "prepare.html").read_text()
    command = (site / "reference" / "command.html").read_text()
    assert "--max_device_bytes" in command
    assert "convert-config" in command


def check_that_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\" >]+)")
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page.name
    for sheet in (site / "site").glob("*.css"):
        assert "http" not in sheet.read_text()


def check_search(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text().startswith("var __index")
    assert 'src="site/iframe-worker.js"' in (site / "index.html").read_text()
    assert (site / "site" / "iframe-worker.js").is_file()
    assert not list(site.rglob("*.py"))
