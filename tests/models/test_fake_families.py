"""A step on fake tensors is the step for real, of every family: operations, gradients, saved tensors, memory."""

import resource
from collections.abc import Callable
from functools import partial

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
    LANGUAGE,
    SIZES,
    TRANSFORMERS,
    gpt2,
    language_loss,
    llama,
    make,
    mixtral,
    qwen3_moe,
)
from tests.simulating import differences, for_real, simulated

READS_VALUES = ("integers", "evaluation_in_between")
#: One is not run in plain torch alone; of the other torch knows no size of what its kernel keeps.
NOT_HERE = ("mixed_dtypes", "lstm")


gpt_neox = partial(make, "GPTNeoXForCausalLM", vocab_size=32, max_position_embeddings=32, **SIZES)
qwen3 = partial(make, "Qwen3ForCausalLM", head_dim=8, **LANGUAGE)


def checkpointed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


OTHERS = [
    Family("gpt_neox", gpt_neox, one_loss(language_loss)),
    Family("qwen3", qwen3, one_loss(language_loss)),
    Family("eager_llama", partial(llama, attn_implementation="eager"), one_loss(language_loss)),
    Family("checkpointed_llama", checkpointed_llama, one_loss(language_loss)),
    Family("in_bfloat16", lambda: llama().to(torch.bfloat16), one_loss(language_loss)),
]
STEPS = [*[*MODULES, *GRAPHS, *ADAPTERS][::7], *TRANSFORMERS[4:], *OTHERS]


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


@pytest.mark.parametrize("build", [gpt2, gpt_neox, qwen3], ids=["gpt2", "gpt_neox", "qwen3"])
def test_flops_are_those_of_torchs_counter(build: Callable[[], nn.Module]) -> None:
    """In eager attention: torch has no formula for that of a cpu."""
    work = step(Family("", build, one_loss(language_loss)))

    def eager() -> nn.Module:
        model = seeded(build)()
        model.set_attn_implementation("eager")
        return model

    with FlopCounterMode(display=False) as counter:
        work(eager())
    flops: list[int] = []
    simulated(eager, work, sink=lambda op: flops.append(op.flops))
    assert sum(flops) == counter.get_total_flops() > 0


EXPERTS = {"num_experts_per_tok": 2, "vocab_size": 32, **SIZES}
gpt_oss = partial(make, "GptOssForCausalLM", num_key_value_heads=1, head_dim=8, num_local_experts=4, **EXPERTS)
#: Experts are chosen within the best group of them.
deepseek_v3 = partial(
    make,
    "DeepseekV3ForCausalLM",
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    **{"num_key_value_heads": 2, **EXPERTS},
)


@pytest.mark.parametrize(
    "build", [mixtral, qwen3_moe, gpt_oss, deepseek_v3], ids=["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
)
def test_routed_experts_compute_as_much_as_they_do_for_real(build: Callable[[], nn.Module]) -> None:
    """One by one: how many rows each gets depends on values, how many all get does not."""

    def one_by_one() -> nn.Module:
        model = seeded(build)()
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
