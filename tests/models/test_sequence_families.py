"""Each kind of model that can share sequences over ranks has the gradients of one rank, also with sliding windows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.integrations.families import Feature, classes_with
from penstock.integrations.ulysses import check_shareable
from tests.lib.models import seeded
from tests.lib.ranks import run_ranks
from tests.lib.refusals import Refusal, refused, rows
from tests.models.test_sequence_parallel import Pairs, assert_alike, pairs_of
from tests.unit.integrations.families_rows import build

SHARED = tuple(classes_with(Feature.SHARED))


def tiny(kind: str, attention: str) -> Any:
    """A model of a class, the same every time, without dropout; windows are of 4 of 11 tokens, a rank has 6, or 3."""
    model = seeded(lambda: build(kind, use_cache=False))
    model.set_attn_implementation(attention)
    return model


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
