"""Model classes of transformers, and the features that each was tried with.

A model outside of this table is refused, or handled the safe way. A wrong row raises no error: the model only trains
on wrong numbers. Tests try every class with every feature of its row.

**Packed rows.** A packed row has position ids that begin anew with each segment, and no attention mask. transformers
finds the segments by them where it makes masks (`transformers.masking_utils`), sliding windows included. But some
models do not pass their position ids on, and recurrent layers, convolutions and linear attention run on from one
segment into the next. Call such a model with `use_cache=False`: with a cache, transformers does not look for segments.
"""

from collections.abc import Mapping
from enum import Flag, auto
from typing import Any


class Feature(Flag):
    """A feature that depends on how a model computes.

    Attributes:
        PACKED: segments of a packed row do not attend to each other.
        CHUNKED: logits are `head(hidden)` with nothing after, and the loss is theirs alone (`chunk_loss`).
        SHARED: tokens meet in attention only, called through transformers' interface (`sequence_parallel`).
    """

    PACKED = auto()
    CHUNKED = auto()
    SHARED = auto()


_PACKED, _ALL = Feature.PACKED, Feature.PACKED | Feature.CHUNKED | Feature.SHARED

FAMILIES: Mapping[str, Feature] = {
    "ApertusForCausalLM": _PACKED,
    "ArceeForCausalLM": _PACKED,
    "BitNetForCausalLM": _PACKED,
    "CodeGenForCausalLM": _PACKED,
    "Cohere2ForCausalLM": _PACKED | Feature.SHARED,
    "CohereForCausalLM": _PACKED | Feature.SHARED,
    "DeepseekV2ForCausalLM": _PACKED,
    "DeepseekV3ForCausalLM": _PACKED,
    "Ernie4_5ForCausalLM": _PACKED,
    "Ernie4_5_MoeForCausalLM": _PACKED,
    "Exaone4ForCausalLM": _PACKED,
    "FlexOlmoForCausalLM": _PACKED,
    "GPT2LMHeadModel": _ALL,
    "GPTBigCodeForCausalLM": _PACKED,
    "GPTJForCausalLM": _PACKED,
    "GPTNeoForCausalLM": _PACKED,
    "GPTNeoXForCausalLM": _ALL,
    "Gemma2ForCausalLM": _PACKED | Feature.SHARED,
    "Gemma3ForCausalLM": _PACKED | Feature.SHARED,
    "GemmaForCausalLM": _ALL,
    "Glm4ForCausalLM": _PACKED,
    "Glm4MoeForCausalLM": _PACKED,
    "GlmForCausalLM": _PACKED,
    "GraniteForCausalLM": _PACKED | Feature.SHARED,
    "GraniteMoeForCausalLM": _PACKED,
    "HeliumForCausalLM": _PACKED,
    "HunYuanDenseV1ForCausalLM": _PACKED,
    "LlamaForCausalLM": _ALL,
    "MinistralForCausalLM": _PACKED,
    "MistralForCausalLM": _ALL,
    "MixtralForCausalLM": _PACKED | Feature.SHARED,
    "NemotronForCausalLM": _PACKED,
    "Olmo2ForCausalLM": _ALL,
    "Olmo3ForCausalLM": _PACKED | Feature.SHARED,
    "OlmoForCausalLM": _ALL,
    "OlmoeForCausalLM": _PACKED,
    "Phi3ForCausalLM": _ALL,
    "PhiForCausalLM": _ALL,
    "Qwen2ForCausalLM": _ALL,
    "Qwen2MoeForCausalLM": _PACKED,
    "Qwen3ForCausalLM": _ALL,
    "Qwen3MoeForCausalLM": _PACKED | Feature.SHARED,
    "SeedOssForCausalLM": _PACKED,
    "SmolLM3ForCausalLM": _ALL,
    "StableLmForCausalLM": _ALL,
    "Starcoder2ForCausalLM": _ALL,
}

#: The oldest transformers with which packed rows were tried.
LEAST_TRANSFORMERS = (5, 22)
# Flash attention looks for segments only where a batch is a single sequence.
_ATTENTION = (None, "sdpa", "eager")
_LAYERS = frozenset({"full_attention", "sliding_attention"})


def classes_with(feature: Feature) -> list[str]:
    """List the classes that were tried with a feature."""
    return [name for name, features in FAMILIES.items() if feature in features]


def is_known(model_class: type, feature: Feature) -> bool:
    """Return True if a class is transformers' own and was tried with a feature."""
    name = model_class.__name__
    return name in FAMILIES and feature in FAMILIES[name] and model_class.__module__.startswith("transformers.")


def other_layers(config: Any) -> list[str]:
    """List the types of a configuration's layers that are neither full attention nor attention in a window."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)


def why_not_isolated(config: Any, model_class: type) -> str | None:
    """Return the reason why rows cannot be packed for a model, as the end of a sentence; `None` if they can be.

    Arguments:
        config: the configuration of transformers.
        model_class: the class of the model that will be built.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> why_not_isolated(LlamaConfig(), LlamaForCausalLM) is None
        True
    """
    import transformers
    from packaging.version import Version

    name = model_class.__name__
    if not is_known(model_class, Feature.PACKED):
        return f"{name} is not known to keep what is packed into one sequence apart"
    if Version(transformers.__version__).release < LEAST_TRANSFORMERS:
        oldest = ".".join(map(str, LEAST_TRANSFORMERS))
        return f"transformers {transformers.__version__} is older than {oldest}, with which packing was tried"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"the attention {attention!r} sees across what is packed into one sequence"
    others = other_layers(config)
    if others:
        return f"its layers of the type {others[0]!r} see across what is packed into one sequence"
    if not getattr(config, "is_causal", True):
        return f"{name} is configured to see what comes later"
    return None
