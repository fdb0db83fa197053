"""Planning a model takes little memory and gives it back: of a process of its own, whatever ran before."""

import gc
import resource

import pytest
import torch

import penstock
from penstock.planner import plan
from tests.lib.ranks import run_ranks

MOST_BYTES, MOST_LEFT_BYTES = 1 << 30, 64 << 20
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}  # 1B
LARGE |= {"num_key_value_heads": 8, "vocab_size": 128256}


def planned(sizes: dict[str, int]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.zeros(8, 1024, dtype=torch.long)
    plan(
        lambda: LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train(),
        torch.optim.AdamW,
        lambda: {"input_ids": ids, "labels": ids},
        machine="rtx4090-desktop",
        placement=penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
    )
    gc.collect()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def in_bytes(rank: int) -> dict[str, int]:
    planned(SMALL)
    before = resident()
    planned(LARGE)
    with open("/proc/self/status") as file:  # getrusage() would give that of the process that has started this one
        (high,) = [line for line in file if line.startswith("VmHWM")]
    peak = 1024 * int(high.split()[1])
    return {"peak": peak, "left": resident() - before}


def test_planning_takes_less_than_a_gibibyte_and_leaves_nothing() -> None:
    pytest.importorskip("transformers")
    (found,) = run_ranks(in_bytes, 1, fresh=True)
    assert found["peak"] < MOST_BYTES
    assert found["left"] < MOST_LEFT_BYTES
