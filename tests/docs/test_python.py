"""The Python of the README and the pages runs as it is written: a page's blocks in order, in one namespace."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT, Block, blocks_of, every_block
from tests.docs.executing import execute, started_anew
from tests.docs.given import GIVEN, nothing

#: Pages whose code other tests run, with the library that it needs or with more to say of what comes out.
BY_OTHERS = {
    "docs/accelerate.md": "integrations/test_pages.py",
    "docs/lightning.md": "integrations/test_pages.py",
    "docs/machines.md": "unit/planner/test_shipped_machines.py",
    "docs/muon.md": "unit/test_pages_of_rules.py",
    "docs/trainer.md": "integrations/test_pages.py",
    "docs/trl.md": "integrations/test_pages.py",
}
RUN = sorted({block.page for block in every_block("python")} - BY_OTHERS.keys())


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in blocks_of(page) if block.kind == "python" and not block.reason + block.needs]
    for library in ("peft", "transformers"):
        if any(f"from {library}" in block.text for block in blocks):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    with started_anew(page) as module, GIVEN.get(page, nothing)() as names:
        module.update(names)
        for block in blocks:
            execute(block, module)
        names.update(module)
    assert not torch.distributed.is_initialized(), "a page leaves no process group behind"


@pytest.mark.parametrize("page", BY_OTHERS)
def test_code_that_others_run_is_run_by_them(page: str) -> None:
    assert Path(page).name in (ROOT / "tests" / BY_OTHERS[page]).read_text()
    assert [block for block in blocks_of(page) if block.kind == "python"]


@pytest.mark.parametrize("block", [block for block in every_block("python") if block.reason], ids=str)
def test_code_that_cannot_run_here_imports_what_there_is(block: Block) -> None:
    """What is left to check of it: it is Python, and the names that it takes from us and from torch are there."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for each in node.names:
                assert hasattr(module, each.name) or find_spec(f"{node.module}.{each.name}"), each.name
