"""A command line in this process, and a model folder small enough for many runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


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
