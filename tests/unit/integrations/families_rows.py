"""Tiny models of transformers, by the name of their class: those that are packed for, and some that are not."""

from collections.abc import Mapping
from typing import Any

from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SIZES, "head_dim": 8}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEO = {**{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "num_attention_heads")}, "num_heads": 4}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}

NO_SHARED_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
WINDOWED, WINDOWED_HEADS = {**SIZES, **WINDOWS}, {**HEADS, **WINDOWS}
WITH_WINDOWS = {**WINDOWED, "use_sliding_window": True}
SLIDING, LOCAL_EXPERTS = {**SIZES, "sliding_window": 4}, {**SIZES, "num_local_experts": 4}
OPT = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "max_position_embeddings")}

#: By class: the arguments of its configuration.
MODELS: Mapping[str, Mapping[str, Any]] = {
    f"{name}{'' if name.endswith('Model') else 'ForCausalLM'}": arguments
    for name, arguments in {
        **dict.fromkeys(
            ("Apertus", "BitNet", "Cohere", "GPTNeoX", "Granite", "Olmo", "Olmo2", "Phi", "StableLm", "Llama"), SIZES
        ),
        **dict.fromkeys(("Arcee", "Ernie4_5", "Gemma", "Glm", "Glm4", "Helium", "HunYuanDenseV1", "Nemotron"), HEADS),
        "SeedOss": HEADS,
        "Qwen3": {**WITH_WINDOWS, "head_dim": 8},
        **dict.fromkeys(("Cohere2", "Gemma2", "Gemma3", "Ministral"), WINDOWED_HEADS),
        **dict.fromkeys(("Exaone4", "Olmo3"), WINDOWED),
        **dict.fromkeys(("Mistral", "Phi3", "Starcoder2"), SLIDING),
        **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCode"), GPT),
        **dict.fromkeys(("DeepseekV2", "DeepseekV3"), LATENT),
        "GraniteMoe": LOCAL_EXPERTS,
        "Mixtral": {**LOCAL_EXPERTS, "sliding_window": 4},
        "CodeGen": {**GPT, "rotary_dim": 4, "n_ctx": 64},
        "Ernie4_5_Moe": {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
        "FlexOlmo": EXPERTS,
        "GPTJ": {**GPT, "rotary_dim": 4},
        "GPTNeo": {**NEO, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        "Glm4Moe": {**LATENT, "head_dim": 8},
        "Olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
        **dict.fromkeys(("Qwen2", "SmolLM3"), WITH_WINDOWS),
        "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
        "Qwen3Moe": {**EXPERTS, "head_dim": 8},
        # Not packed for: masks without position ids, and what is no attention.
        "Falcon": NO_SHARED_HEADS,
        "GptOss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Mamba": MAMBA,
        "OPT": {**OPT, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32},
        "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "Lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    }.items()
}


def build(name: str, **changes: Any) -> nn.Module:
    """The model of a row, in evaluation, with random weights from torch's seed. `Any` is what transformers is."""
    import transformers

    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**{**MODELS[name], **changes})).eval()
