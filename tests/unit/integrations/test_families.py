"""Segments of one sequence: what each makes of its tokens is what it makes of them alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.integrations.families import FAMILIES, Feature, classes_with, is_known, why_not_isolated
from tests.unit.integrations.families_rows import MODELS, build

SEGMENTS = ((9, 1, 8), (18,), (5, 11))  # tokens of each, by sequence; the last sequence is padded by two
WIDTH = 18
EAGER = ("Gemma3ForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")


def packed() -> tuple[Tensor, Tensor]:
    """Ids and positions of shape (3, 18)."""
    ids = torch.randint(3, 64, (len(SEGMENTS), WIDTH), generator=torch.Generator().manual_seed(1))
    rows = [[*lengths, WIDTH - sum(lengths)] for lengths in SEGMENTS]
    return ids, torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def logits(model: nn.Module, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def keeps_apart(model: nn.Module) -> bool:
    """Whether each segment's logits are those of the segment alone."""
    ids, positions = packed()
    together = logits(model, ids, positions)
    equal = []
    for row, lengths in enumerate(SEGMENTS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = logits(model, ids[row : row + 1, part])[0]
            equal.append(torch.allclose(together[row, part], alone, rtol=1e-5, atol=1e-5))
            start += length
    return all(equal)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_packed_for_if_it_keeps_segments_apart(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    implementations = [None, "eager"] if model._supports_sdpa and name in EAGER else [None]
    for implementation in implementations:
        if implementation is not None:
            model.set_attn_implementation(implementation)
        found = why_not_isolated(model.config, type(model)) is None
        assert found == keeps_apart(model)
        assert found == is_known(type(model), Feature.PACKED)


def test_every_class_that_is_packed_for_is_tried() -> None:
    assert set(classes_with(Feature.PACKED)) <= MODELS.keys()
    assert list(FAMILIES) == sorted(FAMILIES)


def test_what_was_not_tried_is_not_packed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(kind: type = LlamaForCausalLM, **changes: Any) -> str:
        config = LlamaConfig()
        vars(config).update(changes)
        return str(why_not_isolated(config, kind))

    other = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": "transformers_modules.folder"})
    assert why(other) == "LlamaForCausalLM is not known to keep what is packed into one sequence apart"
    assert why(layer_types=["full_attention", "linear_attention"]) == (
        "its layers of the type 'linear_attention' see across what is packed into one sequence"
    )
    for changes in ({"_attn_implementation_internal": "flash_attention_2"}, {"is_causal": False}):
        assert why(**changes) != "None"
    monkeypatch.setattr("transformers.__version__", "5.21.9")
    assert why() == "transformers 5.21.9 is older than 5.22, with which packing was tried"
