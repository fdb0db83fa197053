"""What goes wrong while a model computes is one line; what goes wrong in the engine is not hidden."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.training.model import computing
from penstock.errors import EngineError, MemoryBudgetError
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
    with pytest.raises(MemoryBudgetError, match=said), computing(source):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("ours"), AssertionError(), EngineError("named")])
@pytest.mark.parametrize("folder", [True, False])
def test_what_is_not_the_models_is_raised_as_it_is(model_folder: Path, error: Exception, folder: bool) -> None:
    source = find_model(str(model_folder) if folder else "tiny", seq_length=8)
    with pytest.raises(type(error)) as raised, computing(source):
        raise error
    assert raised.value is error
