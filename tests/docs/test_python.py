"""The Python of the README and the pages runs as it is written: a page's blocks in order, in one namespace."""

import ast
import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT, Block, blocks_of, every_block
from tests.docs.given import GIVEN, nothing

#: Pages whose code other tests run, with the library that it needs or with more to say of what comes out.
BY_OTHERS = {
    "docs/accelerate.md": "integrations/test_accelerate_methods.py",
    "docs/lightning.md": "integrations/test_lightning_docs.py",
    "docs/machines.md": "unit/forecast/test_shipped_machines.py",
    "docs/muon.md": "unit/test_pages_of_rules.py",
    "docs/trainer.md": "integrations/test_trainer_settings.py",
    "docs/trl.md": "integrations/test_trl_generation.py",
}
RUN = sorted({block.page for block in every_block("python")} - BY_OTHERS.keys())


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in blocks_of(page) if block.kind == "python" and not block.reason]
    for library in ("peft", "transformers"):
        if any(f"from {library}" in block.text for block in blocks):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    with started_anew(page) as module, GIVEN.get(page, nothing)() as names:
        module.update(names)
        for block in blocks:
            # Lines of an error are those of the page.
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), module)
        names.update(module)
    assert not torch.distributed.is_initialized(), "a page leaves no process group behind"


@contextlib.contextmanager
def started_anew(page: str) -> Iterator[dict[str, object]]:
    """A module for a page's code, so that classes which it makes can be found; and torch as it was, afterwards."""
    module = type(sys)(f"page_{Path(page).stem.replace('-', '_')}")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    sys.modules[module.__name__] = module
    try:
        torch.manual_seed(0)
        yield module.__dict__
    finally:
        del sys.modules[module.__name__]
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        torch.compiler.reset()


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
                assert hasattr(module, each.name), f"{node.module}.{each.name}"
