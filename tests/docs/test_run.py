"""The commands of the README and of docs/start.md are run as they are written, in order, in one folder.

What they name is there: a model of 80 thousand parameters, fifty conversations, a script of somebody's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.docs.commands import COMMANDS, MIXED, Command, commands_of
from tests.instruct import chat_file, instruct_folder

PAGES = ["README.md", "docs/start.md"]
THEIR_SCRIPT = """
import torch, transformers

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (8, 4))]
args = transformers.TrainingArguments("theirs", max_steps=2, report_to="none", use_cpu=True)
transformers.Trainer(model=model, args=args, train_dataset=rows).train()
"""


def commands(page: str) -> list[Command]:
    """Those of ours; what `make` and `pip` are given, others look at."""
    found = [command for block in blocks_of(page) if block.kind in COMMANDS + MIXED for command in commands_of(block)]
    return [command for command in found if command.program in ("penstock", "torchrun")]


def several(command: Command) -> bool:
    """Whether it starts processes."""
    return command.words[0] == "torchrun" or command.words[1] == "launch"


#: One of each program.
SEVERAL = {each.program: each for page in PAGES for each in commands(page) if several(each)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reader of the page is."""
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    model = instruct_folder(tmp_path / "path" / "to" / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "path" / "to" / "config").mkdir()
    longer = json.dumps(config | {"max_position_embeddings": 2048})
    (tmp_path / "path" / "to" / "config" / "config.json").write_text(longer)
    chat_file(tmp_path / "chat.jsonl")
    (tmp_path / "penstock.yaml").write_text("placement: {params: cpu, optimizer: cpu}\n")
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}\n')
    (tmp_path / "their_script.py").write_text(THEIR_SCRIPT)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_what_the_page_types_works(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli import main
    from penstock.train.default import library_files

    few = library_files()[:40]  # a run without data reads all of them
    monkeypatch.setattr("penstock.train.data.library_files", lambda: few)
    run = [command for command in commands(page) if not several(command)]
    assert len(run) >= 4
    for command in run:
        monkeypatch.setattr("sys.argv", list(command.words))
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        # The doctor's 1 is about the machine of the tests.
        assert end.value.code == 0 or (command.words[1], end.value.code) == ("doctor", 1), (str(command), said.err)
    assert list((folder / "runs").glob("*/model.safetensors"))


def typed_on_rank(rank: int, words: list[str], folder: Path) -> object:
    """What a process of a launcher does: the command, to its end."""
    from penstock.cli import main

    os.chdir(folder)
    sys.argv = words
    try:
        main()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("command", list(SEVERAL.values()), ids=str)
def test_what_several_processes_do_works_too(command: Command, folder: Path) -> None:
    """In two ranks, which are forked: that torchrun, and launch, start them, others look at."""
    from tests.train.runs import run_ranks

    if "launch" in command.words:
        pytest.importorskip("accelerate")
    words = list(command.words)
    at = words.index("--nproc-per-node")
    assert words.pop(at + 1) == "2"
    words.pop(at)
    if command.program == "torchrun":
        assert words[1:3] == ["-m", "penstock"]
        words[:3] = ["penstock"]
    assert run_ranks(typed_on_rank, 2, words, folder) == [0, 0]


def test_make_train_is_the_command() -> None:
    """As `make -n` would run it: without setting up anything."""
    of_make = ("MAKE", "ARGS")  # variables of a make around this
    alone = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
    told = subprocess.run(["make", "-n", "train"], env=alone, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1].rstrip().endswith("bin/penstock train")
