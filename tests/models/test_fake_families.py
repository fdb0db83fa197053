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
    TRANSFORMERS,
    gpt2,
    language_loss,
    llama,
    mixtral,
    qwen3_moe,
)
from tests.simulating import differences, for_real, simulated
from tests.unit.integrations.families_rows import build

READS_VALUES = ("integers", "evaluation_in_between")
#: One is not run in plain torch alone; of the other torch knows no size of what its kernel keeps.
NOT_HERE = ("mixed_dtypes", "lstm")


gpt_neox, qwen3 = (partial(build, f"{name}ForCausalLM") for name in ("GPTNeoX", "Qwen3"))


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
STEPS = [*[*MODULES, *GRAPHS, *ADAPTERS][1::7], *TRANSFORMERS[4:], *OTHERS]


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


gpt_oss = partial(build, "GptOssForCausalLM")
#: Experts are chosen within the best group of them.
deepseek_v3 = partial(build, "DeepseekV3ForCausalLM", n_group=2, first_k_dense_replace=0)
ROUTED = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "deepseek_v3": deepseek_v3}
DENSE = {"gpt2": gpt2, "gpt_neox": gpt_neox, "qwen3": qwen3}


@pytest.mark.parametrize("name", [*DENSE, *ROUTED])
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    """In eager attention: torch has no formula for that of a cpu.

    Experts one by one: how many rows each gets depends on values, how many all get does not.
    """
    build = seeded((DENSE | ROUTED)[name])

    def eager() -> nn.Module:
        model = build()
        model.config._experts_implementation = "eager"
        model.set_attn_implementation("eager")
        return model

    def work(model: nn.Module) -> None:
        ids = Batch(0).ids(32, 4, 64 if name in ROUTED else 6)
        model(input_ids=ids, labels=ids).loss.backward()

    with FlopCounterMode(display=False) as counter:
        work(eager())
    flops: list[int] = []
    seen = simulated(eager, work, sink=lambda op: flops.append(op.flops))
    assert sum(flops) == counter.get_total_flops() > 0
    real = for_real(eager, work)
    assert seen.gradients == real.gradients
    # Experts are not of equal load for real.
    assert seen.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02 if name in ROUTED else 0)


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
