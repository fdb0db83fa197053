"""Models and batches of the planner's rows."""

from typing import Any

import torch

SIZES = {
    "8b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336),
    "70b": dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672),
    "1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, intermediate_size=8192),
    "355m": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=2560),
}


def llama(**sizes: Any) -> torch.nn.Module:
    """A small Llama, with attention in single operations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = dict(hidden_size=64, intermediate_size=128, vocab_size=64, max_position_embeddings=128, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False, attn_implementation="eager")
    return LlamaForCausalLM(LlamaConfig(**(given | heads | sizes)))


def gpt2() -> torch.nn.Module:
    """A small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=96, n_positions=64, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def large(name: str) -> torch.nn.Module:
    """A Llama of `SIZES`."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(large_config(name))


def large_config(name: str) -> Any:
    """Its configuration."""
    from transformers import LlamaConfig

    vocabulary, groups = (32000, 16) if name == "355m" else (128256, 8)
    shape: dict[str, Any] = dict(SIZES[name])
    config = LlamaConfig(
        **shape, vocab_size=vocabulary, num_key_value_heads=groups, max_position_embeddings=8192, use_cache=False
    )
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    return config


def batch(sequences: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """A micro-batch of zeros."""
    ids = torch.zeros(sequences, length, dtype=torch.long)
    return dict(input_ids=ids, labels=ids)
