"""`penstock launch`: somebody's script, or a module, as it is, on one process and on two, and how it ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.cli.launch import _script_of_trl
from penstock.errors import ConfigError
from tests.integrations.trainers import assert_weights
from tests.integrations.trl_cases import causal, folder_of, texts
from tests.lib.memory import disks

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
LAUNCH = ("-m", "penstock", "launch", "--config", "p.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "p.yaml").write_text(f"placement: {{params: nvme, optimizer: cpu, nvme_path: {disks()[0]}}}\n")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "PENSTOCK_CONFIG": ""}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | quiet
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_a_script_on_two_processes(folder: Path) -> None:
    launched = run(folder, *LAUNCH, "--nproc-per-node", "2", "script.py", "--output_dir", "ours", *WORDS)
    assert launched.returncode == 0, launched.stderr
    said = "penstock launch: transformers.Trainer trains by Penstock, with the arguments in p.yaml."
    assert [line for line in launched.stdout.splitlines() if "penstock launch: " in line] == [said]
    said = [(folder / f"ours-{rank}").read_text() for rank in range(2)]
    assert said == ["PenstockTrainer PreparedOptimizer True True script.py"] * 2
    assert all(value.isfinite().all() for value in load_file(folder / "ours" / "model.safetensors").values())


def test_what_a_script_raises_is_shown_as_python_shows_it(folder: Path) -> None:
    (folder / "script.py").write_text("def f():\n    open('nothing.txt')\n\nf()\n")
    launched = run(folder, *LAUNCH, "script.py")
    assert launched.returncode == 1
    assert "Traceback (most recent call last)" in launched.stderr
    assert 'script.py", line 2, in f' in launched.stderr
    assert launched.stderr.rstrip().endswith("No such file or directory: 'nothing.txt'")


def test_a_module_trains_as_it_is_and_ends_with_its_status(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "module.py").write_text(
        "import sys, transformers\nprint(__name__, __package__, transformers.Trainer.__name__, *sys.argv[1:])\n"
        "sys.exit(len(sys.argv))"
    )
    launched = run(folder, *LAUNCH, "-m", "package.module", "--config", "theirs.yaml", "-m")
    said = launched.stdout.splitlines()[-1]
    assert said == "__main__ package PenstockTrainer --config theirs.yaml -m", launched.stderr
    assert launched.returncode == 4


@pytest.fixture
def sft(folder: Path) -> Path:
    """A run file of TRL's, over a model and rows of its own."""
    folder_of(causal(), folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(16)))
    lines = ["model_name_or_path: model", "dataset_name: data", "output_dir: out", "max_steps: 4", "logging_steps: 1"]
    lines += [
        "use_cpu: true",
        "bf16: false",
        "report_to: none",
        "save_strategy: 'no'",
        "per_device_train_batch_size: 2",
    ]
    (folder / "sft.yaml").write_text("\n".join([*lines, "learning_rate: 0.01", "disable_tqdm: true"]))
    return folder


def losses(stdout: str) -> list[float]:
    """What a trainer has printed of its steps."""
    return [float(match) for match in re.findall(r"'loss': '?([\d.]+)", stdout)]


def test_trl_sft_trains_as_trl_does(sft: Path) -> None:
    theirs = run(sft, "-m", "trl.cli.main", "sft", "--config", "sft.yaml", "--output_dir", "theirs")
    assert theirs.returncode == 0, theirs.stderr
    ours = run(sft, *LAUNCH, "-m", "trl", "sft", "--config", "sft.yaml")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines()[0].startswith("penstock launch: transformers.Trainer trains by Penstock")
    assert losses(ours.stdout) == losses(theirs.stdout)
    assert len(losses(ours.stdout)) == 4
    assert_weights(*(load_file(sft / name / "model.safetensors") for name in ("out", "theirs")))


def test_options_of_accelerates_launcher_are_refused_by_name(sft: Path) -> None:
    (sft / "more.yaml").write_text((sft / "sft.yaml").read_text() + "\nnum_processes: 2\naccelerate_config: zero3\n")
    said = "trl sft has no --num_processes, --accelerate_config, --mixed_precision. Options of accelerate's launcher"
    with pytest.raises(ConfigError, match=said):
        _script_of_trl(["sft", "--config", str(sft / "more.yaml"), "--mixed_precision", "bf16"])


@pytest.mark.parametrize("words", [[], ["env"], ["vllm-serve", "--model", "m"]])
def test_commands_of_trl_that_train_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"use a training command of TRL: .*dpo, grpo, kto.*sft"):
        _script_of_trl(words)
