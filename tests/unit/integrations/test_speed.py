"""Model FLOPs utilisation: what a token costs, what a device can do."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.integrations.lora import Lora, add_adapters
from penstock.integrations.speed import flops_per_token, peak_flops
from tests.lib import models

HIDDEN, MIDDLE, LAYERS, VOCABULARY = 16, 32, 2, 64
OF_LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MIDDLE
PRODUCTS = LAYERS * OF_LAYER + HIDDEN * VOCABULARY  # the head, and no embeddings and norms
ATTENTION = 12 * LAYERS * HIDDEN * 8


def llama(**sizes: Any) -> nn.Module:
    given = {"num_key_value_heads": 2, "intermediate_size": MIDDLE, "vocab_size": VOCABULARY}
    return models.llama(LAYERS, HIDDEN, **given | sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_six_operations_for_each_weight_of_a_product(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    assert flops_per_token(model, seq_length=8) == 6 * PRODUCTS + ATTENTION


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    """Also where the layer's sizes are those of what peft wraps around it."""
    model = add_adapters(llama(), Lora(r=2, targets=("q_proj",)), seed=0)
    adapters = LAYERS * 2 * 2 * HIDDEN
    assert flops_per_token(model, seq_length=8) == 4 * PRODUCTS + 6 * adapters + ATTENTION


def test_weights_that_are_packed_count_by_their_layer() -> None:
    class Packed(nn.Module):
        in_features, out_features = 3, 5

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(8, dtype=torch.int8))

    assert flops_per_token(nn.Sequential(Packed(), nn.Dropout()), seq_length=8) == 4 * 15


def test_of_a_mixture_the_experts_that_a_token_sees() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **sizes
    )
    router = LAYERS * HIDDEN * 4
    experts = LAYERS * (OF_LAYER + 3 * HIDDEN * MIDDLE)  # two of the four
    assert flops_per_token(MixtralForCausalLM(config), seq_length=8) == (
        6 * (experts + router + HIDDEN * VOCABULARY) + ATTENTION
    )


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H200", (989.5e12, 989.5e12, 67e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 312e12, 19.5e12)),
        ("NVIDIA GeForce RTX 4090", (165.2e12, 165.2e12, 82.6e12)),
        ("Tesla V100-SXM2-32GB", (None, 125e12, 15.7e12)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (None, None, None)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (None, None, None)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (503.8e12, 503.8e12, 125e12)),
        ("", (None, None, None)),
    ],
)
def test_devices_that_are_known(name: str, peaks: tuple[float | None, ...]) -> None:
    assert tuple(peak_flops(name, precision) for precision in ("bf16", "fp16", "fp32")) == peaks
