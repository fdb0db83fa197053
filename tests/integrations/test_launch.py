"""`penstock launch`: somebody's script, or a module, as it is, on one process and on two, and how it ends."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.cli import main
from penstock.cli.launch import _script_of_trl
from penstock.errors import ConfigError
from tests.integrations.trainers import assert_weights
from tests.integrations.trl_cases import ON_GPUS_ALONE, causal, folder_of, texts
from tests.lib.memory import disks
from tests.train.runs import COMMON, run_child, run_ranks, theirs, written

#: It knows nothing of penstock.
SCRIPT = """
import sys
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import Trainer as Same

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    ids = torch.randint(64, (16, 8))
    trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    trainer.save_model()
    names = [type(trainer).__name__, type(trainer.optimizer).__name__]
    said = [*names, issubclass(Seq2SeqTrainer, Trainer), Same is Trainer, sys.argv[0]]
    print(*said)
    with open(f"{args.output_dir}-{args.process_index}", "w") as file:  # ranks that print at once mix their lines
        file.write(" ".join(map(str, said)))
"""
WORDS = shlex.split(
    "--use_cpu --max_steps 3 --report_to none --disable_tqdm True --save_strategy no --max_grad_norm 0.5"
)
COMMAND = ("penstock", "launch", "--config", "p.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "p.yaml").write_text(f"placement: {{params: nvme, optimizer: cpu, nvme_path: {disks()[0]}}}\n")
    return tmp_path


def typed(folder: Path, words: tuple[str, ...]) -> None:
    """What a process of the command does; what it says is in files."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [*COMMAND, *words]
    main()


def launched(folder: Path, *words: str) -> tuple[int, str, str]:
    """The exit status of the command, in a process that is forked, and what it said."""
    status = run_child(typed, folder, words)
    return status, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def typed_on_rank(rank: int, folder: Path, words: tuple[str, ...]) -> None:
    with contextlib.suppress(SystemExit):
        typed(folder, words)
    sys.stdout.flush()


def test_a_script_on_two_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command becomes torchrun; and what that starts, in ranks that are forked."""
    words = ("script.py", "--output_dir", "ours", *WORDS)
    become: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: become.append(argv) or sys.exit())
    monkeypatch.setattr(sys, "argv", [*COMMAND, "--nproc-per-node", "2", *words])
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert become == [[*torchrun, "-m", *COMMAND, *words]]
    run_ranks(typed_on_rank, 2, folder, words)
    said = "penstock launch: transformers.Trainer trains by Penstock, with the arguments in p.yaml."
    assert [line for line in (folder / "stdout").read_text().splitlines() if "penstock launch: " in line] == [said]
    names = [(folder / f"ours-{rank}").read_text() for rank in range(2)]
    assert names == ["PenstockTrainer PreparedOptimizer True True script.py"] * 2
    assert all(value.isfinite().all() for value in load_file(folder / "ours" / "model.safetensors").values())


def test_what_a_script_raises_is_shown_as_python_shows_it(folder: Path) -> None:
    (folder / "script.py").write_text("def f():\n    open('nothing.txt')\n\nf()\n")
    status, _, said = launched(folder, "script.py")
    assert status == 1
    assert "Traceback (most recent call last)" in said
    assert 'script.py", line 2, in f' in said
    assert said.rstrip().endswith("No such file or directory: 'nothing.txt'")


def test_a_module_trains_as_it_is_and_ends_with_its_status(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "module.py").write_text(
        "import sys, transformers\nprint(__name__, __package__, transformers.Trainer.__name__, *sys.argv[1:])\n"
        "sys.exit(len(sys.argv))"
    )
    status, said, errors = launched(folder, "-m", "package.module", "--config", "theirs.yaml", "-m")
    assert said.splitlines()[-1] == "__main__ package PenstockTrainer --config theirs.yaml -m", errors
    assert status == 4


@pytest.mark.skipif(ON_GPUS_ALONE, reason="TRL 1.15 computes its loss by kernels for GPUs alone")
def test_trl_sft_trains_as_trl_does(folder: Path) -> None:
    """In a process of its own: TRL is imported when `transformers.Trainer` is Penstock's."""
    folder_of(causal(), folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(16)))
    files = {"model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "data")}
    settings = COMMON | files | {"max_steps": 4}
    file = written(settings | {"output_dir": "out"}, folder, "sft")
    command = [sys.executable, "-m", *COMMAND, "-m", "trl", "sft", "--config", str(file)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ours = subprocess.run(
        command, cwd=folder, env=environment | {"CI": "1"}, capture_output=True, text=True, timeout=240
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines()[0].startswith("penstock launch: transformers.Trainer trains by Penstock")
    expected = theirs(settings, folder / "theirs")
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", ours.stdout)]
    assert losses == pytest.approx(expected.losses, rel=1e-3)  # it prints four digits
    assert len(losses) == 4
    assert_weights(load_file(folder / "out" / "model.safetensors"), expected.weights)


def test_options_of_accelerates_launcher_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        "output_dir: out\nuse_cpu: true\nbf16: false\nnum_processes: 2\naccelerate_config: zero3\n"
    )
    said = "trl sft has no --num_processes, --accelerate_config, --mixed_precision. Options of accelerate's launcher"
    with pytest.raises(ConfigError, match=said):
        _script_of_trl(["sft", "--config", str(tmp_path / "more.yaml"), "--mixed_precision", "bf16"])


@pytest.mark.parametrize("words", [[], ["env"], ["vllm-serve", "--model", "m"]])
def test_commands_of_trl_that_train_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"use a training command of TRL: .*dpo, grpo, kto.*sft"):
        _script_of_trl(words)
