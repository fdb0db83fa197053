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

#: By class: the class of its configuration, and its arguments.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ApertusForCausalLM": ("ApertusConfig", SIZES),
    "ArceeForCausalLM": ("ArceeConfig", HEADS),
    "BitNetForCausalLM": ("BitNetConfig", SIZES),
    "CodeGenForCausalLM": ("CodeGenConfig", {**GPT, "rotary_dim": 4, "n_ctx": 64}),
    "Cohere2ForCausalLM": ("Cohere2Config", {**HEADS, **WINDOWS}),
    "CohereForCausalLM": ("CohereConfig", SIZES),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", LATENT),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", HEADS),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig",
        {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    "Exaone4ForCausalLM": ("Exaone4Config", {**SIZES, **WINDOWS}),
    "FlexOlmoForCausalLM": ("FlexOlmoConfig", EXPERTS),
    "GPT2LMHeadModel": ("GPT2Config", GPT),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", GPT),
    "GPTJForCausalLM": ("GPTJConfig", {**GPT, "rotary_dim": 4}),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {**NEO, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES),
    "Gemma2ForCausalLM": ("Gemma2Config", {**HEADS, **WINDOWS}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**HEADS, **WINDOWS}),
    "GemmaForCausalLM": ("GemmaConfig", HEADS),
    "Glm4ForCausalLM": ("Glm4Config", HEADS),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {**LATENT, "head_dim": 8}),
    "GlmForCausalLM": ("GlmConfig", HEADS),
    "GraniteForCausalLM": ("GraniteConfig", SIZES),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", {**SIZES, "num_local_experts": 4}),
    "HeliumForCausalLM": ("HeliumConfig", HEADS),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", HEADS),
    "LlamaForCausalLM": ("LlamaConfig", SIZES),
    "MinistralForCausalLM": ("MinistralConfig", {**HEADS, **WINDOWS}),
    "MistralForCausalLM": ("MistralConfig", {**SIZES, "sliding_window": 4}),
    "MixtralForCausalLM": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "NemotronForCausalLM": ("NemotronConfig", HEADS),
    "Olmo2ForCausalLM": ("Olmo2Config", SIZES),
    "Olmo3ForCausalLM": ("Olmo3Config", {**SIZES, **WINDOWS}),
    "OlmoForCausalLM": ("OlmoConfig", SIZES),
    "OlmoeForCausalLM": ("OlmoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "Phi3ForCausalLM": ("Phi3Config", {**SIZES, "sliding_window": 4}),
    "PhiForCausalLM": ("PhiConfig", SIZES),
    "Qwen2ForCausalLM": ("Qwen2Config", {**SIZES, **WINDOWS, "use_sliding_window": True}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3ForCausalLM": ("Qwen3Config", HEADS),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 8}),
    "SeedOssForCausalLM": ("SeedOssConfig", HEADS),
    "SmolLM3ForCausalLM": ("SmolLM3Config", SIZES),
    "StableLmForCausalLM": ("StableLmConfig", SIZES),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {**SIZES, "sliding_window": 4}),
    # Not packed for: masks without position ids, and what is no attention.
    "FalconForCausalLM": ("FalconConfig", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "GptOssForCausalLM": ("GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "MambaForCausalLM": ("MambaConfig", MAMBA),
    "OPTForCausalLM": (
        "OPTConfig",
        {
            **{k: SIZES[k] for k in ("vocab_size", "hidden_size", "pad_token_id")},
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Lfm2ForCausalLM": ("Lfm2Config", {**SIZES, "layer_types": ["conv", "full_attention"]}),
}


def build(name: str, **changes: Any) -> nn.Module:
    """The model of a row, in evaluation, with random weights from torch's seed. `Any` is what transformers is."""
    import transformers

    config_name, arguments = MODELS[name]
    config_class, model_class = getattr(transformers, config_name), getattr(transformers, name)
    return model_class(config_class(**{**arguments, **changes})).eval()
