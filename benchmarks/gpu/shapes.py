"""The models by name: transformers configurations with random weights, and the arithmetic that a token takes."""

from typing import Any

import torch

_QWEN3 = dict(
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "LlamaConfig",
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=256),
    ),
    "125m": (  # its tokens are bytes, so nearly all of it is layers
        "LlamaConfig",
        dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3456, vocab_size=256),
    ),
    "qwen3-0.6b": ("Qwen3Config", _QWEN3 | dict(hidden_size=1024, intermediate_size=3072)),
    "qwen3-1.7b": ("Qwen3Config", _QWEN3 | dict(hidden_size=2048, intermediate_size=6144)),
    "llama-3-8b": (
        "LlamaConfig",
        dict(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            tie_word_embeddings=False,
        ),
    ),
}

ATTENTION = "sdpa"
#: FLOPs of forward and backward of one token, as `flops_per_token` counts them.
FLOPS_FORMULA = "6 N + 12 L Q T"
#: Dense bf16 FLOP/s with fp32 accumulation, as the vendor states them, by a part of the device's name.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def build(shape: str, *, sequence: int, recompute: bool, device: torch.device) -> torch.nn.Module:
    """A model with bf16 weights on the cpu, drawn on the device because that is quick.

    Arguments:
        sequence: tokens of a sequence, at most.
        recompute: each layer saves its input alone, and computes its forward again in backward.
        device: meta for a model without values.
    """
    import transformers

    kind, sizes = SHAPES[shape]
    config = getattr(transformers, kind)(
        **sizes, max_position_embeddings=sequence, use_cache=False, attn_implementation=ATTENTION
    )
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if device.type != "meta":
        model.cpu()
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def flops_per_token(model: torch.nn.Module, sequence: int) -> int:
    """FLOPs of forward and backward of one token: `6 N + 12 L Q T`.

    N counts the parameters that multiply: all but an input embedding that is not the output head too. L layers, Q the
    width of all their attention heads, T the sequence. Causal attention counts in full, and what is computed again
    does not count. Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    config = model.config
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    multiplied = sum(p.numel() for p in model.parameters()) - (0 if embedding is head else embedding.numel())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * multiplied + 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * sequence


def peak_flops(device_name: str | None) -> float | None:
    """What the device could do in a second; `None` where the table does not have it."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in (device_name or "")), None)
