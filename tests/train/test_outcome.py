"""What a run leaves: a model for `from_pretrained`, its file, its numbers, its page; and runs that have no options."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.train.default import library_files
from tests.instruct import instruct_folder
from tests.train.runs import (
    CPU,
    MIXED,
    NVME,
    STEPS,
    assert_same_weights,
    checkpoints,
    command,
    listening,
    metrics,
    ours,
    refused,
    saved,
    steps_of,
    written,
)
from tests.train.test_as_trl import ASSISTANT, settings_of


def logits(folder: Path, text: str = "What is the password?") -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        return model(tokens["input_ids"]).logits


def test_the_saved_model_is_the_trained_one(made: Path, tmp_path: Path) -> None:
    """It has the held-out loss that the run has told, and another run trains it on from there."""
    settings = settings_of(made, "chats", **ASSISTANT, eval_strategy="steps", eval_steps=3)
    found = ours(settings, tmp_path / "out", penstock=NVME)
    assert logits(found.out).shape[-1] == 259
    again = {**settings, "model_name_or_path": str(found.out), "learning_rate": 0.0, "eval_on_start": True}
    told = ours(again, tmp_path / "again", penstock=CPU)
    last = [line["eval_loss"] for line in found.logs if "eval_loss" in line][-1]
    first = next(line["eval_loss"] for line in told.logs if "eval_loss" in line)
    assert first == pytest.approx(last, rel=1e-6)
    assert torch.equal(logits(found.out), logits(told.out))


def test_what_lies_in_the_folder(made: Path, tmp_path: Path) -> None:
    found = ours(settings_of(made, "texts", logging_steps=2), tmp_path / "out", penstock=CPU)
    names = {path.name for path in found.out.iterdir()}
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert model | {"run.yaml", "metrics.jsonl", "report.html"} <= names
    assert "trace.json" in names
    told = {key for line in metrics(found.out) if line["event"] == "step" and line["step"] == STEPS for key in line}
    assert {"loss", "grad_norm", "bytes_by_tier"} <= told
    page = (found.out / "report.html").read_text()
    assert "loss" in page


# A run is a file


def test_the_file_of_a_run_makes_the_same_run(made: Path, tmp_path: Path) -> None:
    settings = settings_of(made, "chats", **ASSISTANT, packing=True, eval_strategy="steps", eval_steps=3)
    settings |= {"save_strategy": "steps", "save_steps": 1}
    words = ["--learning-rate", "0.003", "--save-strategy", "no", "--params", "device=0.5,cpu=0.5"]
    found = ours(settings, tmp_path / "first", *words, penstock={"optimizer": "nvme", "nvme_path": MIXED["nvme_path"]})
    assert checkpoints(found.out) == [], "what is typed wins over the file, also where it is the default"
    file = yaml.safe_load((found.out / "run.yaml").read_text())
    assert file["learning_rate"] == 0.003
    assert "weight_decay" not in file
    assert file["penstock"]["optimizer"] == "nvme"
    with listening() as heard:
        assert command(["--config", str(found.out / "run.yaml"), "--out", str(tmp_path / "second")]) == 0
    assert heard == found.logs
    assert_same_weights(saved(tmp_path / "second"), found.weights, 0)
    again = yaml.safe_load((tmp_path / "second" / "run.yaml").read_text())
    assert {**again, "output_dir": ""} == {**file, "output_dir": ""}


# A run without options


def test_without_options_a_small_model_reads_pythons_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default run, cut to a few steps and documents: it learns, and has a model that reads bytes."""
    out = tmp_path / "out"
    few = library_files()[:8]
    monkeypatch.setattr("penstock.train.data.library_files", lambda: few)
    with listening() as heard:
        words = ["--max_steps", "4", "--logging_steps", "1", "--per_device_train_batch_size", "2"]
        assert command(["--out", str(out), *words]) == 0
    losses = [loss for loss, _, _ in steps_of(heard)]
    assert len(losses) == 4
    assert 5 < losses[0] < 6, "nothing is known of 257 tokens"
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "def naïve(): return '🚰'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert torch.isfinite(logits(out, text)).all()
    file = yaml.safe_load((out / "run.yaml").read_text())
    assert file["max_steps"] == 4


# A plan


def test_a_run_does_what_a_plan_says(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(made, "texts", max_steps=2)
    found = ours(settings, tmp_path / "auto", "--placement", "auto")
    assert "plan" in "".join(capfd.readouterr())
    plan: dict[str, Any] = json.loads((found.out / "plan.json").read_text())
    assert yaml.safe_load((found.out / "run.yaml").read_text())["penstock"] == {"plan": str(found.out / "plan.json")}
    planned = ours(settings, tmp_path / "planned", "--plan", str(found.out / "plan.json"))
    assert steps_of(planned.logs) == steps_of(found.logs)
    assert json.loads((planned.out / "plan.json").read_text()) == plan
    other = instruct_folder(tmp_path / "other", hidden_size=64)
    file = written(settings | {"model_name_or_path": str(other), "output_dir": str(tmp_path / "out")}, tmp_path, "run")
    assert "The plan is for a model of" in refused(["--config", str(file), "--plan", str(found.out / "plan.json")])


CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path("ran").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_where_it_is_trusted(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "own"
    shutil.copytree(made / "plain", model)
    (model / "modeling_own.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (model / "config.json").write_text(json.dumps(config))
    settings = settings_of(made, "texts", model_name_or_path=str(model), max_steps=1)
    found = ours(settings, tmp_path / "out", "--trust_remote_code", "true", penstock=CPU)
    assert found.status == 0
    assert (tmp_path / "ran").exists()
    assert found.weights
