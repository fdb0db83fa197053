"""Each kind of model that can share sequences over ranks has the gradients of one rank, also with sliding windows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.integrations.families import Feature, classes_with
from penstock.integrations.ulysses import check_shareable, sequence_parallel
from penstock.parallel import cut, token_mean
from tests.lib.ranks import run_ranks
from tests.models.test_sequence_parallel import batch, sum_of, whole_loss

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


def gradients(rank: int, ranks: int, kinds: tuple[str, ...]) -> dict[str, list[tuple[str, Tensor, Tensor]]]:
    """Of each type, attention and kind of batch, the gradients of one rank and the sum of those of all."""
    found = {}
    for number, kind in enumerate(kinds):
        attention = "eager" if number % 2 or kind == "Gemma2ForCausalLM" else "sdpa"  # which caps its scores
        rows = "causal" if number % 3 == 0 and ranks == 2 else "packed"
        model, other = tiny(kind, attention), tiny(kind, attention)
        whole_loss(model, [batch(rows)]).backward()
        mine = cut(batch(rows), rank, ranks)
        labels = mine.pop("shift_labels")
        assert labels is not None
        with sequence_parallel(other):
            loss = token_mean(sum_of(other(**mine).logits, labels), (labels != -100).sum())
            loss.backward()
        pairs = []
        for (name, one), many in zip(model.named_parameters(), other.parameters(), strict=True):
            if one.grad is None:
                assert many.grad is None
                continue
            summed = torch.zeros_like(many) if many.grad is None else many.grad
            dist.all_reduce(summed)
            pairs.append((name, one.grad, summed / ranks))
        found[f"{kind} {attention} {rows}"] = pairs
    return found


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, SHARED), (4, SHARED[::4])],
)
def test_gradients_of_every_class_are_those_of_one_rank(ranks: int, kinds: tuple[str, ...]) -> None:
    for found in run_ranks(gradients, ranks, ranks, kinds):
        for row, pairs in found.items():
            assert pairs
            for name, one, many in pairs:
                least = 5e-6 * one.abs().max().item()  # elements that are sums of larger ones
                torch.testing.assert_close(many, one, rtol=5e-6, atol=least, msg=lambda text: f"{row} {name} {text}")  # noqa: B023


def test_attention_of_its_own_under_a_known_name_is_refused() -> None:
    model = tiny("StableLmForCausalLM", "sdpa")
    layer = model.model.layers[0]
    layer.self_attn.__class__ = type("OwnAttention", (type(layer.self_attn),), {"__module__": "transformers_modules.x"})
    with pytest.raises(ConfigError, match="the model's attention is its own, that of StableLmForCausalLM"):
        check_shareable(model, 2)


@pytest.mark.parametrize(("kind", "name"), [("gpt_oss", "GptOssForCausalLM"), ("vit", "SimpleNamespace")])
def test_classes_that_are_not_known_are_refused_by_name(kind: str, name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match=f"^{name} is not known to share a sequence"):
        check_shareable(SimpleNamespace(config=config, _supports_attention_backend=True), 2)


def test_layers_of_other_kinds_are_refused() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2)
    config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match="layers with linear_attention cannot share"):
        check_shareable(SimpleNamespace(config=config, _supports_attention_backend=True), 2)
