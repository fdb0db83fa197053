"""The commands of docs/start.md and of the README are run as they are written, in order, in one folder.

What they name is there: a model of 80 thousand parameters, twelve conversations, a script of somebody's. What both
pages type, with another name for what comes out, is run once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.docs.commands import COMMANDS, MIXED, Command, commands_of
from tests.instruct import chat_file, conversations, instruct_folder

PAGES = ["docs/start.md", "README.md"]
THEIR_SCRIPT = """
import torch, transformers

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (8, 4))]
args = transformers.TrainingArguments("theirs", max_steps=2, report_to="none", use_cpu=True)
transformers.Trainer(model=model, args=args, train_dataset=rows).train()
"""


def commands(*, of_ranks: bool) -> list[Command]:
    """Those of ours, of several processes or of one; what `make` and `pip` are given, others look at."""
    blocks = [block for page in PAGES for block in blocks_of(page) if block.kind in COMMANDS + MIXED]
    found = [command for block in blocks for command in commands_of(block)]
    ours = [command for command in found if command.program in ("penstock", "torchrun")]
    return [each for each in ours if (each.program == "torchrun" or each.words[1] == "launch") == of_ranks]


def what_it_does(command: Command) -> tuple[str, ...]:
    """Its words, without the name of what comes out."""
    words = list(command.words)
    if "--out" in words:
        words[words.index("--out") + 1] = ""
    return tuple(words)


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
    chat_file(tmp_path / "chat.jsonl", conversations(12))
    (tmp_path / "penstock.yaml").write_text("placement: {params: cpu, optimizer: cpu}\n")
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}\n')
    (tmp_path / "their_script.py").write_text(THEIR_SCRIPT)
    return tmp_path


def test_what_the_pages_type_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli import main
    from penstock.train.default import DEFAULTS, library_files

    few = library_files()[:8]  # a run without data reads all of them, in large batches
    monkeypatch.setattr("penstock.train.data.library_files", lambda: few)
    small = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    monkeypatch.setattr("penstock.train.arguments.DEFAULTS", DEFAULTS | small)
    typed = commands(of_ranks=False)
    assert {command.page for command in typed} == set(PAGES)
    done: set[tuple[str, ...]] = set()
    for command in typed:
        if what_it_does(command) in done:
            continue
        done.add(what_it_does(command))
        monkeypatch.setattr("sys.argv", list(command.words))
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        # The doctor's 1 is about the machine of the tests.
        assert end.value.code == 0 or (command.words[1], end.value.code) == ("doctor", 1), (str(command), said.err)
    assert list((folder / "runs").glob("*/model.safetensors"))


def typed_on_rank(rank: int, typed: list[list[str]], folder: Path) -> list[object]:
    """What a process of a launcher does: each command, to its end."""
    from penstock.cli import main
    from tests.train.runs import process_as_it_was

    os.chdir(folder)
    ends: list[object] = []
    for words in typed:
        sys.argv = words
        with process_as_it_was(), pytest.raises(SystemExit) as end:
            main()
        ends.append(end.value.code)
    return ends


def test_what_several_processes_do_works_too(folder: Path) -> None:
    """One of each launcher, in two ranks, which are forked: that torchrun, and launch, start them, others look at."""
    from tests.train.runs import run_ranks

    typed = []
    for command in {each.program: each for each in commands(of_ranks=True)}.values():
        words = list(command.words)
        at = words.index("--nproc-per-node")
        assert words[at + 1] == "2"
        del words[at : at + 2]
        if command.program == "torchrun":
            assert words[1:3] == ["-m", "penstock"]
            words[:3] = ["penstock"]
        typed.append(words)
    assert [words[1] for words in typed] == ["train", "launch"]
    assert run_ranks(typed_on_rank, 2, typed, folder) == [[0, 0]] * 2


def test_make_train_is_the_command() -> None:
    """As `make -n` would run it: without setting up anything."""
    of_make = ("MAKE", "ARGS")  # variables of a make around this
    alone = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
    told = subprocess.run(["make", "-n", "train"], env=alone, capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1].rstrip().endswith("bin/penstock train")
