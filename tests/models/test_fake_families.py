"""A step on fake tensors is the step for real, of every family: operations, gradients, saved tensors, memory."""

import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.model_copy import copy_model
from tests.models.adapters_rows import ADAPTERS
from tests.models.family import Batch, Family, one_loss
from tests.models.graphs_rows import GRAPHS
from tests.models.modules_rows import MODULES
from tests.models.transformers_rows import (
    SIZES,
    TRANSFORMERS,
    gpt2,
    language_loss,
    llama,
    mixtral,
    qwen3_moe,
)
from tests.simulating import differences, for_real, simulated

READS_VALUES = ("integers", "evaluation_in_inference_mode")
#: One is not run in plain torch alone; of the other torch knows no size of what its kernel keeps.
NOT_HERE = ("mixed_dtypes", "lstm")


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=32, max_position_embeddings=32, **sizes))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, num_key_value_heads=1, head_dim=8, **sizes))


def eager_llama() -> nn.Module:
    return llama(attn_implementation="eager")


def checkpointed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


def in_bfloat16() -> nn.Module:
    return llama().to(torch.bfloat16)


OTHERS = [
    Family(make.__name__, make, one_loss(language_loss))
    for make in (gpt_neox, qwen3, eager_llama, checkpointed_llama, in_bfloat16)
]
STEPS = [
    *[*MODULES, *GRAPHS, *ADAPTERS][::7],
    *TRANSFORMERS[4:],
    *OTHERS,
]


def of_values(row) -> bool:
    return row.name in READS_VALUES + NOT_HERE


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return build


def step(family: Family) -> Callable[[nn.Module], None]:
    def work(model: nn.Module) -> None:
        family.work(model, Batch(0), lambda loss, **how: loss.backward(**how))

    return work


@pytest.mark.parametrize("family", [row for row in STEPS if not of_values(row)], ids=str)
def test_a_simulated_step_is_the_step(family: Family) -> None:
    real = for_real(seeded(family.build), step(family))
    assert list(differences(simulated(seeded(family.build), step(family)), real)) == []
    assert real.peak_bytes > 0
    assert real.saved


@pytest.mark.parametrize("family", [row for row in MODULES + GRAPHS if row.name in READS_VALUES], ids=str)
def test_models_that_look_at_values_are_told_so(family: Family) -> None:
    with pytest.raises((ConfigError, AssertionError)) as refused:
        simulated(seeded(family.build), step(family))
    if refused.type is ConfigError:  # a list of values is read past torch: it has zeros
        assert "reads a value" in str(refused.value)


@pytest.mark.parametrize("make", [gpt2, gpt_neox, qwen3])
def test_flops_are_those_of_torchs_counter(make: Callable[[], nn.Module]) -> None:
    """In eager attention: torch has no formula for that of a cpu."""
    work = step(Family("", make, one_loss(language_loss)))

    def eager() -> nn.Module:
        model = seeded(make)()
        model.set_attn_implementation("eager")
        return model

    with FlopCounterMode(display=False) as counter:
        work(eager())
    flops: list[int] = []
    simulated(eager, work, sink=lambda op: flops.append(op.flops))
    assert sum(flops) == counter.get_total_flops() > 0


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(vocab_size=32, **sizes, **SIZES))


def deepseek_v3() -> nn.Module:
    """Experts are chosen within the best group of them."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
    sizes = {**SIZES, **heads, **experts, "topk_group": 1, "first_k_dense_replace": 0}
    return DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=32, num_key_value_heads=2, **sizes))


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, gpt_oss, deepseek_v3])
def test_routed_experts_compute_as_much_as_they_do_for_real(make: Callable[[], nn.Module]) -> None:
    """One by one: how many rows each gets depends on values, how many all get does not."""

    def one_by_one() -> nn.Module:
        model = seeded(make)()
        model.config._experts_implementation = "eager"
        model.set_attn_implementation("eager")
        return model

    def work(model: nn.Module) -> None:
        ids = Batch(0).ids(32, 4, 64)
        model(input_ids=ids, labels=ids).loss.backward()

    with FlopCounterMode(display=False) as counter:
        work(one_by_one())
    flops: list[int] = []
    seen = simulated(one_by_one, work, sink=lambda op: flops.append(op.flops))
    assert sum(flops) == counter.get_total_flops() > 0
    real = for_real(one_by_one, work)
    assert seen.gradients == real.gradients
    assert seen.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)  # experts are not of equal load for real


def test_a_large_model_costs_addresses_alone() -> None:
    """An 8B Llama, 8 x 2,048 tokens, checkpointed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes)).to(torch.bfloat16)
    model.train().gradient_checkpointing_enable()
    model = copy_model(model)
    ids = torch.zeros(8, 2048, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flops: list[int] = []
    with FakeOperations(lambda op: flops.append(op.flops)) as mode:
        model(input_ids=ids, labels=ids).loss.backward()
    numel = sum(p.numel() for p in model.parameters())
    assert numel == 8_030_261_248
    assert mode.memory.live_bytes == 2 * numel
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 256 << 20
    products = 2 * ids.numel() * (numel - 128256 * 4096)
    attention = 32 * 2 * 2 * 8 * 2048 * 2048 * 4096
    head = 2 * ids.numel() * 128256 * 4096
    last = 32 * 2 * ids.numel() * 4096 * 14336
    # Forward, once more but for the head and the last product of a block, and backward: two products for each, and five
    # of attention for two.
    assert sum(flops) == pytest.approx(4 * products - head - last + (2 + 2.5) * attention, rel=1e-3)
