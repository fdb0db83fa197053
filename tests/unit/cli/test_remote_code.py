"""Code in a model folder runs when its reader says so, and never otherwise; nor is anybody asked at a prompt."""

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = ["--precision", "fp32", "--seq-length", "32", "--batch-size", "2", "--eval-sequences", "4", "--steps", "1"]
RUN += ["--sample-tokens", "2", "--out", "out"]

MODEL = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path("ran-model").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
import pathlib
from transformers import PreTrainedTokenizerFast

pathlib.Path("ran-tokenizer").touch()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CUSTOM_GENERATE = 'import pathlib\npathlib.Path("ran-generate").touch()\ndef generate(model, **options): ...\n'


@pytest.fixture(autouse=True)
def no_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever answers says yes; copies of code stay in the test's folder."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    from penstock.integrations.tokenizers import ByteTokenizer

    folder = tmp_path / "own"
    shutil.copytree(model_folder, folder)
    ByteTokenizer().save(folder)
    (folder / "modeling_own.py").write_text(MODEL)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CUSTOM_GENERATE)
    return folder


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def own_model(folder: Path) -> None:
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=auto_map)


def own_tokenizer(folder: Path) -> None:
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)


def native_with_code(folder: Path) -> None:
    """As many folders are: transformers has a class for it since, and the code is still there."""
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit(folder / "config.json", auto_map=auto_map)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]})


def kernel_from_elsewhere(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="somebody/kernel")


def ran() -> list[str]:
    return sorted(name for name in os.listdir() if name.startswith("ran-"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (own_model, "config.json names {'AutoConfig': 'modeling_own.OwnConfig', 'AutoModelForCausalLM': "),
        (own_tokenizer, "tokenizer_config.json names {'AutoTokenizer': [None, 'tokenization_own.OwnTokenizer']}."),
        (kernel_from_elsewhere, 'config.json names the kernel "somebody/kernel".'),
    ],
)
def test_a_folder_that_needs_code_is_refused_by_the_name_of_the_option(
    penstock_command: Callable[..., Any],
    folder: Path,
    text_folder: Path,
    change: Callable[[Path], None],
    named: str,
) -> None:
    change(folder)
    outcome = penstock_command("train", "--model", str(folder), "--data", str(text_folder), *RUN)
    assert outcome.exit_code == 2
    assert outcome.err.startswith("penstock: error: ")
    assert named in outcome.err
    assert outcome.err.endswith(" Read that code first; then allow it with --trust-remote-code.\n")
    assert outcome.err.count("\n") == 1
    assert ran() == []


@pytest.mark.parametrize("kind", ["known", "through from_pretrained"])
def test_a_folder_that_needs_none_runs_none(
    penstock_command: Callable[..., Any], folder: Path, text_folder: Path, kind: str, monkeypatch: Any
) -> None:
    native_with_code(folder)
    if kind != "known":
        monkeypatch.setattr("penstock.cli.training.learning.model.build_empty", lambda source: None)
    outcome = penstock_command("train", "--model", str(folder), "--data", str(text_folder), *RUN)
    assert outcome.exit_code == 0, outcome.err
    assert ran() == []


def test_code_that_is_trusted_runs(penstock_command: Callable[..., Any], folder: Path, text_folder: Path) -> None:
    own_model(folder)
    own_tokenizer(folder)
    arguments = ["--model", str(folder), "--data", str(text_folder), "--trust-remote-code"]
    outcome = penstock_command("train", *arguments, *RUN)
    assert outcome.exit_code == 0, outcome.err
    assert ran() == ["ran-model", "ran-tokenizer"]


def test_pickled_weights_are_not_read(
    penstock_command: Callable[..., Any], folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    """Neither instead of safetensors nor beside some of another name."""
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran-pickle",)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Evil()))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "pytorch_model.bin"}}')
    outcome = penstock_command("train", "--model", str(folder), "--data", str(text_folder), *RUN)
    assert outcome.exit_code == 2
    assert outcome.err.count("\n") == 1
    edit_adapter = folder / "adapter_config.json"
    edit_adapter.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}))
    outcome = penstock_command("train", "--model", str(folder), "--data", str(text_folder), *RUN)
    assert outcome.exit_code == 2
    assert "holds adapters (adapter_config.json) beside a model" in outcome.err
    assert ran() == []
