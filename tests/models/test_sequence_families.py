"""Each kind of model that can share sequences over ranks has the gradients of one rank, also with sliding windows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.integrations.families import Feature, classes_with
from penstock.integrations.ulysses import check_shareable
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows
from tests.models.test_sequence_parallel import Pairs, assert_alike, pairs_of

WINDOW = 4  # of sequences of 11 tokens, of which a rank has 6, or 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = tuple(classes_with(Feature.SHARED))
#: What a class needs beside that: windows, in all layers or in some.
CHANGES: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": MIXED,
    "Gemma2ForCausalLM": MIXED | {"query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": MIXED | {"query_pre_attn_scalar": 8},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "MixtralForCausalLM": {"sliding_window": WINDOW, "num_local_experts": 2},
    "Olmo3ForCausalLM": MIXED,
    "Phi3ForCausalLM": {"sliding_window": WINDOW},
    "Qwen2ForCausalLM": MIXED | {"use_sliding_window": True},
    "Qwen3ForCausalLM": MIXED | {"use_sliding_window": True},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "SmolLM3ForCausalLM": MIXED | {"use_sliding_window": True},
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
}


def tiny(kind: str, attention: str) -> Any:
    """A model of a class, the same every time, without dropout."""
    import transformers

    config = getattr(transformers, kind).config_class(
        vocab_size=40, bos_token_id=0, eos_token_id=1, pad_token_id=None, **SIZES | CHANGES.get(kind, {})
    )
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.use_cache = False
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def gradients(rank: int, ranks: int, kinds: tuple[str, ...]) -> dict[str, Pairs]:
    found = {}
    for number, kind in enumerate(kinds):
        attention = "eager" if number % 2 or kind == "Gemma2ForCausalLM" else "sdpa"  # which caps its scores
        of_batch = "causal" if number % 3 == 0 and ranks == 2 else "packed"
        model, other = tiny(kind, attention), tiny(kind, attention)
        found[f"{kind} {attention} {of_batch}"] = pairs_of(model, other, of_batch, rank, ranks)
    return found


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, SHARED), (4, SHARED[::4])],
)
def test_gradients_of_every_class_are_those_of_one_rank(ranks: int, kinds: tuple[str, ...]) -> None:
    for found in run_ranks(gradients, ranks, ranks, kinds):
        assert_alike(found, 5e-6)


def own_attention() -> Any:
    model = tiny("StableLmForCausalLM", "sdpa")
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("OwnAttention", (type(attention),), {"__module__": "transformers_modules.x"})
    return model


def configured(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **changes)
    config._attn_implementation = "sdpa"
    return SimpleNamespace(config=config, _supports_attention_backend=True)


OTHER_LAYERS = {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
UNKNOWN = "is not known to share a sequence"
REFUSED = {
    "own attention": Refusal(own_attention, "the model's attention is its own, that of StableLmForCausalLM"),
    "another class": Refusal(partial(configured, "gpt_oss"), f"GptOssForCausalLM {UNKNOWN}"),
    "no language model": Refusal(partial(configured, "vit"), f"SimpleNamespace {UNKNOWN}"),
    "other layers": Refusal(partial(configured, "qwen3", **OTHER_LAYERS), "layers with linear_attention cannot share"),
}


@rows(REFUSED)
def test_what_cannot_share_a_sequence_is_refused_by_name(row: Refusal) -> None:
    model = row.do()
    refused(replace(row, do=lambda: check_shareable(model, 2)))
