"""The estimates of a step's sizes, held against what torch keeps."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, MambaConfig, Qwen3Config

from penstock.cli.training.sizes import step_sizes

SIZES = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
FAMILIES = {
    "llama": (LlamaConfig, {"num_key_value_heads": 4}, 0.05),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 4, "head_dim": 16}, 0.4),
    "gpt_neox": (GPTNeoXConfig, {}, 0.4),
}


def kept_bytes(config: Any, batch_size: int, seq_length: int) -> int:
    """Count the bytes of what forward keeps, parameters left out."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(batch_size, seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return sum(kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_keep(family: str) -> None:
    kind, more, tolerance = FAMILIES[family]
    one, three = (kept_bytes(kind(num_hidden_layers=n, **SIZES, **more), 2, 64) for n in (1, 3))
    config = kind(num_hidden_layers=2, **SIZES, **more)
    sizes = step_sizes(config, vocab_size=257, batch_size=2, seq_length=64, itemsize=4)
    assert sizes is not None
    assert sizes.kept_bytes == pytest.approx(three - one, rel=tolerance)
    assert sizes.recomputed_bytes == 2 * 2 * 64 * 64 * 4 + sizes.kept_bytes // 2


def test_logits_are_the_largest_tensor_of_a_large_vocabulary_alone() -> None:
    def largest(vocab_size: int, seq_length: int) -> bool:
        config = LlamaConfig(**{**SIZES, "vocab_size": vocab_size})
        sizes = step_sizes(config, vocab_size=vocab_size, batch_size=1, seq_length=seq_length, itemsize=2)
        assert sizes is not None
        assert sizes.logits_bytes == vocab_size * seq_length * 4
        return sizes.logits_are_largest

    assert largest(128_000, 1024)
    assert not largest(128_000, 16)  # the embedding is larger
    assert not largest(64, 1024)  # the inner product is


def test_a_configuration_that_does_not_say() -> None:
    assert step_sizes(GPT2Config(), vocab_size=9, batch_size=1, seq_length=8, itemsize=4) is not None  # has aliases
    assert step_sizes(MambaConfig(), vocab_size=9, batch_size=1, seq_length=8, itemsize=4) is not None

    class Odd:
        def get_text_config(self) -> "Odd":
            return self

    assert step_sizes(Odd(), vocab_size=9, batch_size=1, seq_length=8, itemsize=4) is None
