"""A command line in this process, a corpus and a model folder small enough for many runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.instruct import chat_file, instruct_folder


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    out: str
    err: str


@pytest.fixture
def penstock_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """`penstock ...` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        from penstock.cli import main

        monkeypatch.setattr("sys.argv", ["penstock", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Forty short documents that are easy to learn."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8 + f"{number}\n")
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 50 thousand parameters with tied embeddings, its vocabulary large enough for bytes, no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def instruct_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 80 thousand parameters with a tokenizer of bytes and a chat template."""
    return instruct_folder(tmp_path_factory.mktemp("instruct") / "model")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Fifty conversations."""
    return chat_file(tmp_path / "chat.jsonl")
