"""The blocks of the README and of docs/start.md that need a library which `make setup` does not bring."""

from pathlib import Path

import pytest

from tests.docs.blocks import Block, every_block
from tests.docs.executing import execute, started_anew
from tests.docs.given import in_a_trainer

BLOCKS = [block for block in every_block("python") if block.needs]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(block.needs)
    monkeypatch.chdir(tmp_path)
    with started_anew(block.page) as module, in_a_trainer() as names:
        module.update(names)
        execute(block, module)
