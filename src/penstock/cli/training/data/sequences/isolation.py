"""Which models keep the segments of a packed sequence apart.

A packed batch has position ids that begin anew with each segment, and no attention mask. transformers sees that
(`transformers.masking_utils`, where it makes masks) and lets every token attend to its own segment only, through
sliding windows too. A mask of our own in four dimensions would be taken for every layer as it is, and the windows lost.

But not every model hands its position ids on to where masks are made, and what runs along the sequence in other ways
than attention (recurrent layers, convolutions, linear attention) runs on from one segment into the next. None of it is
an error: the model trains on text that it should not see. So a model is packed for only if its class was tried, as
`tests/unit/cli/sequences/test_isolation.py` tries every class of `ISOLATING`. Whoever calls such a model passes
`use_cache=False`: with a cache, transformers does not look for segments.
"""

from typing import Any

#: Classes of transformers that were tried.
ISOLATING = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BitNetForCausalLM",
    "CodeGenForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
)

#: The oldest transformers with which they were tried.
LEAST_TRANSFORMERS = (5, 22)
# Flash attention looks for segments only where a batch is a single sequence.
_ATTENTION = (None, "sdpa", "eager")
_LAYERS = frozenset({"full_attention", "sliding_attention"})


def isolates(config: Any, model_class: type) -> bool:
    """Tell whether segments of a packed sequence do not see each other, before the model is built.

    Arguments:
        config: the configuration of transformers.
        model_class: the class of the model that will be built.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> isolates(LlamaConfig(), LlamaForCausalLM)
        True
    """
    return why_not_isolated(config, model_class) is None


def why_not_isolated(config: Any, model_class: type) -> str | None:
    """Say why sequences are not packed for a model, as the end of a sentence; `None` where they can be."""
    import transformers

    name = model_class.__name__
    if name not in ISOLATING or not model_class.__module__.startswith("transformers."):
        return f"{name} is not known to keep what is packed into one sequence apart"
    if _version(transformers.__version__) < LEAST_TRANSFORMERS:
        oldest = ".".join(map(str, LEAST_TRANSFORMERS))
        return f"transformers {transformers.__version__} is older than {oldest}, with which packing was tried"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"the attention {attention!r} sees across what is packed into one sequence"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        return f"its layers of the type {others[0]!r} see across what is packed into one sequence"
    if not getattr(config, "is_causal", True):
        return f"{name} is configured to see what comes later"
    return None


def _version(text: str) -> tuple[int, ...]:
    """Read the first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())
