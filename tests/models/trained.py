"""Runs of `penstock train` in this process, on models and data of a few kilobytes, and what they leave."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.naming import naming_options
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.interruption import Interruption
from tests.instruct import ANSWER, QUESTION, chat_file, instruct_folder

COMMON: dict[str, Any] = {
    "precision": "fp32",
    "seq_length": 128,
    "batch_size": 2,
    "steps": 3,
    "lr": 3e-3,
    "log_every": 1,
    "eval_sequences": 8,
    "sample_tokens": 0,
    "chunked_loss": "off",
    "seed": 3,
}


@dataclass(frozen=True)
class Trained:
    """What `metrics.jsonl` says of a run.

    Attributes:
        losses: of every step.
        norms: of every step's gradient.
        evaluations: step and held-out loss.
    """

    losses: list[float]
    norms: list[float]
    evaluations: list[tuple[int, float]]


def train(out: Path, **settings: Any) -> Trained:
    """Train with `COMMON` and other settings, to the end."""
    from penstock.cli.training.run import run

    with naming_options():
        config = TrainConfig(out=out, **COMMON | settings)
        assert run(config, Interruption())
    return read(out)


def read(out: Path) -> Trained:
    """Read what a run has written."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    return Trained(
        losses=[line["loss"] for line in steps],
        norms=[line["grad_norm"] for line in steps],
        evaluations=[(line["step"], line["loss"]) for line in lines if line["event"] == "eval"],
    )


def model_of(kind: str, folder: Path) -> str:
    """Make a model of a kind, once; the value of `--model`."""
    made = folder / f"model-{kind}"
    if kind == "tiny" or made.exists():
        return kind if kind == "tiny" else str(made)
    if kind == "gpt2":
        return str(_gpt2(made))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    # A token more than the embedding has rows: it grows.
    return str(instruct_folder(made, vocab_size=258 if kind == "grows" else 259, **sizes, **TIED.get(kind, {})))


TIED: dict[str, dict[str, Any]] = {"tied": {"tie_word_embeddings": True}}


def _gpt2(folder: Path) -> Path:
    """Save a GPT-2 without dropout, with the tokenizer and chat template of the instruct model."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.instruct import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=259, bos_token_id=256, eos_token_id=258, **sizes, **rates)
    GPT2LMHeadModel(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def data_of(kind: str, folder: Path) -> tuple[str, ...]:
    """Make data of a kind, once; the values of `--data`."""
    folder = folder / "data"
    folder.mkdir(exist_ok=True)
    texts = [f"{number}: the quick brown fox jumps over the lazy dog. " * (1 + number % 5) for number in range(48)]
    chat, pairs, parquet = folder / "chat.jsonl", folder / "pairs.jsonl", folder / "text.parquet"
    if kind in ("chat", "weighted") and not chat.exists():
        chat_file(chat)
    if kind == "pairs" and not pairs.exists():
        rows = [{"prompt": f"{QUESTION} {number} ", "completion": ANSWER * (number % 3 + 1)} for number in range(48)]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind in ("parquet", "weighted") and not parquet.exists():
        import pyarrow as pa
        from pyarrow import parquet as pq

        pq.write_table(pa.table({"text": texts}), parquet)
    if kind == "text":
        (folder / "text.txt").write_text(" ".join(texts))
    return {
        "text": (str(folder / "text.txt"),),
        "chat": (str(chat),),
        "pairs": (str(pairs),),
        "parquet": (str(parquet),),
        "weighted": (f"{chat}:0.7", f"{parquet}:0.3"),
    }[kind]


@contextmanager
def placed_at(rank: int, world_size: int) -> Iterator[None]:
    """The environment of a rank, as torchrun makes it."""
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
