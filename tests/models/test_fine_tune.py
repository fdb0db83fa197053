"""`penstock train` on conversations: what comes out answers the question that it was taught, and it did not before."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.training import run as command
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.interruption import Interruption
from tests.instruct import ANSWER, QUESTION, chat_file, conversations, instruct_folder
from tests.support import disks, run_ranks, thorough

pytest.importorskip("peft")

OTHER = "24-zyx"  # what adapters teach a model that knows the first answer and each of its letters
CPU = {"params": {"cpu": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"cpu": 1.0}}
NVME = {"params": {"nvme": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"nvme": 1.0}}
LORA = {"lora": "r=16"}
INT8 = {"lora": "r=16,base=int8"}
PADDED = {"packing": "off"}


def settings(model: Path, data: Path, out: Path, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "model": str(model),
        "data": (str(data),),
        "out": out,
        "precision": "fp32",
        "seq_length": 128,
        "lr": 1e-2,
        "steps": 50,
        "batch_size": 4,
        "eval_sequences": 0,
        "sample_tokens": 0,
        "log_every": 10,
        "nvme_path": (str(disks()[0]),),
    }
    return TrainConfig(**given | changes)


def train_rank(rank: int, config: TrainConfig) -> None:
    command.joined = lambda ranks: nullcontext()  # the group is there
    assert command.run(config, Interruption())


def train(config: TrainConfig, *, ranks: int = 1) -> Path:
    if ranks > 1:
        run_ranks(train_rank, ranks, config)
    else:
        assert command.run(config, Interruption())
    return config.out


def answer_of(model: Any, folder: Path) -> str:
    """What a model says to the question, as its user asks it: by the chat template, until the turn ends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": QUESTION}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**given, max_new_tokens=20, do_sample=False)
    return str(tokenizer.decode(made[0, given["input_ids"].shape[1] :]))


def answer(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    return answer_of(AutoModelForCausalLM.from_pretrained(folder), folder)


def answer_with_adapter(base: Path, folder: Path) -> str:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return answer_of(PeftModel.from_pretrained(loaded, folder / "adapter"), folder)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    folder = instruct_folder(tmp_path_factory.mktemp("untaught"))
    assert ANSWER not in answer(folder)
    return folder


@pytest.fixture(scope="module")
def taught(untaught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the command has taught the first answer."""
    folder = tmp_path_factory.mktemp("taught")
    return train(settings(untaught, chat_file(folder / "chat.jsonl"), folder / "out"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Conversations with the other answer."""
    return chat_file(tmp_path / "other.jsonl", json.loads(json.dumps(conversations()).replace(ANSWER, OTHER)))


def test_a_model_learns_its_answer_and_when_it_ends(taught: Path) -> None:
    assert answer(taught) == f"{ANSWER}<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param(NVME, 2, id="nvme, two ranks"),
        thorough(CPU | PADDED, 1, id="cpu, padded"),
        thorough(NVME | {"chunked_loss": "on", "recompute": "on"}, 1, id="nvme, chunked, recomputed"),
        thorough({"precision": "bf16"}, 1, id="bf16"),
    ],
)
def test_wherever_it_is(untaught: Path, tmp_path: Path, changes: dict[str, Any], ranks: int) -> None:
    chat = chat_file(tmp_path / "chat.jsonl")
    batch = {"batch_size": 4 // ranks}
    out = train(settings(untaught, chat, tmp_path / "out", **changes | batch), ranks=ranks)
    assert answer(out) == f"{ANSWER}<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param(LORA | CPU, 1, id="cpu"),
        pytest.param(INT8 | NVME, 2, id="codes on nvme, two ranks"),
        thorough(LORA | NVME, 2, id="nvme, two ranks"),
        thorough(INT8, 1, id="codes"),
        thorough(LORA | PADDED | {"precision": "bf16"}, 1, id="bf16, padded"),
    ],
)
def test_adapters_teach_a_model_another_answer(
    taught: Path, other: Path, tmp_path: Path, changes: dict[str, Any], ranks: int
) -> None:
    """Merged they answer, and alone beside the base; the base is as it was."""
    batch = {"batch_size": 4 // ranks}
    out = train(settings(taught, other, tmp_path / "out", **changes | batch), ranks=ranks)
    assert answer(out) == f"{OTHER}<|im_end|>"
    assert answer_with_adapter(taught, out) == f"{OTHER}<|im_end|>"
    assert answer(taught) == f"{ANSWER}<|im_end|>"


@pytest.mark.parametrize(
    "changes", [pytest.param(LORA | NVME, id="nvme"), thorough(CPU, id="all"), thorough(INT8, id="codes")]
)
def test_a_run_that_went_on_has_learned_it(taught: Path, other: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """To the same bytes, of what is merged and of the adapters alone."""
    saving = settings(taught, other, tmp_path / "whole", save_every=10, keep=9, **changes)
    whole = train(saving)
    middle = whole / "checkpoints" / "step-00000010"
    again = train(settings(taught, other, tmp_path / "again", resume=str(middle), **changes))
    assert answer(again) == f"{OTHER}<|im_end|>"
    files = ["model.safetensors", *(["adapter/adapter_model.safetensors"] if "lora" in changes else [])]
    for name in files:
        assert (again / name).read_bytes() == (whole / name).read_bytes()
