"""The Python of the pages about other libraries, and of blocks that need one which `make setup` does not bring."""

from pathlib import Path

import pytest

from penstock.integrations.arguments import prepare_arguments
from tests.docs.blocks import Block, blocks_of, every_block
from tests.docs.executing import execute, started_anew
from tests.docs.given import in_a_trainer
from tests.integrations.trl_cases import causal, folder_of

BLOCKS = [block for block in every_block("python") if block.needs]
#: By page: what is written otherwise where there is no device, and what it makes.
PAGES = {
    "docs/accelerate.md": ({}, ["state/penstock", "weights/model.safetensors"]),
    "docs/lightning.md": ({}, [f"{made}/checkpoint.json" for made in ("step-8", "adversaries/maker")]),
    "docs/trainer.md": ({'Arguments("out", ': "use_cpu=True, "}, ["trained/model.safetensors"]),
    "docs/trl.md": ({'Config("out", ': "use_cpu=True, max_completion_length=4, "}, ["trained/model.safetensors"]),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")  # else TRL tells its makers
    folder_of(causal(), tmp_path / "Qwen3-0.6B")
    more, files = PAGES[page]
    with started_anew(page) as module:
        for block in blocks_of(page):
            text = block.text
            for call, arguments in more.items():
                text = text.replace(call, call + arguments)
            if block.kind == "python":
                execute(Block(page, block.line, block.kind, text), module)
    assert all((tmp_path / file).exists() for file in files)


def test_the_file_of_the_page_of_trainer() -> None:
    yaml = pytest.importorskip("yaml")
    (block,) = [block for block in blocks_of("docs/trainer.md") if block.kind == "yaml"]
    assert prepare_arguments(yaml.safe_load(block.text))["stage"] == 3


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(block.needs)
    monkeypatch.chdir(tmp_path)
    with started_anew(block.page) as module, in_a_trainer() as names:
        module.update(names)
        execute(block, module)
