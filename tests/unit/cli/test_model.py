"""What goes wrong while a model computes is one line; what goes wrong in the engine is not hidden."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.cli.options import option_of, options_of
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.model import compile_blocks, computing
from penstock.errors import ConfigError, EngineError, MemoryBudgetError
from penstock.integrations.huggingface import find_model

RUN = ["--precision", "fp32", "--seq-length", "32", "--batch-size", "2", "--eval-sequences", "0", "--steps", "1"]
RUN += ["--sample-tokens", "0", "--out", "out"]


def test_a_configuration_that_cannot_be_computed(
    penstock_command: Callable[..., Any], model_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 5.0}))
    outcome = penstock_command("train", "--model", str(folder), "--data", str(text_folder), *RUN)
    assert outcome.exit_code == 2
    assert f"The model in {folder} cannot compute: dropout probability has to be between 0 and 1" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: tried 1 byte")]
)
def test_too_little_memory(error: Exception) -> None:
    source = find_model("tiny", seq_length=8)
    said = r"^There is too little memory: .* Use a smaller --batch-size"
    with pytest.raises(MemoryBudgetError, match=said) as caught, computing(source):
        raise error
    named = re.findall(r"--[a-z-]+", str(caught.value))
    assert (
        {"--recompute", "--chunked-loss", "--params", "--activations", "--lora"}
        <= set(named)
        <= {option_of(name) for name in options_of(TrainConfig)}
    )


@pytest.mark.parametrize("error", [RuntimeError("ours"), AssertionError(), EngineError("named")])
@pytest.mark.parametrize("folder", [True, False])
def test_what_is_not_the_models_is_raised_as_it_is(model_folder: Path, error: Exception, folder: bool) -> None:
    source = find_model(str(model_folder) if folder else "tiny", seq_length=8)
    with pytest.raises(type(error)) as raised, computing(source):
        raise error
    assert raised.value is error


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes | changes))


def test_blocks_are_compiled_and_nothing_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(self))
    model = llama()
    model.model.layers[0].rows = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    compile_blocks(model)
    assert compiled == list(model.model.layers)
    with pytest.raises(ConfigError, match=r"^--compile finds no row of equal blocks in Linear\. Leave the option out"):
        compile_blocks(nn.Linear(2, 2))


def test_a_compiler_that_is_missing_is_said_before_anything_is_built(
    penstock_command: Callable[..., Any], text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = penstock_command("train", "--data", str(text_folder), "--compile", "--out", "out")
    assert outcome.exit_code == 2
    said = "penstock: error: --compile needs a compiler, and there is no /nonexistent/g++. Install one, name it in CXX,"
    assert outcome.err.startswith(said)
    assert not (tmp_path / "out").exists()


def test_what_fails_while_it_is_compiled_is_one_line() -> None:
    from torch._dynamo.exc import Unsupported

    with (
        pytest.raises(ConfigError, match=r"^--compile: a jump\. Leave the option out\.$"),
        computing(find_model("tiny", seq_length=8)),
    ):
        raise Unsupported("a jump\n Set TORCHDYNAMO_VERBOSE=1", "a jump")


@pytest.mark.thorough
def test_compiled_blocks_make_the_same_losses() -> None:
    found = []
    for backend in (None, "aot_eager"):
        model = llama()
        if backend is not None:
            compile_blocks(model, backend=backend)
        optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="fp32")
        ids = torch.arange(24).view(2, 12)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        optimizer.close(keep_params=False)
    assert found[3:] == pytest.approx(found[:3], rel=1e-6)
