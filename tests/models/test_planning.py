"""Planning a model takes little memory and gives it back: of a process of its own, whatever ran before."""

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MOST_BYTES, MOST_LEFT_BYTES = 1 << 30, 64 << 20

SCRIPT = """
import gc, json, resource, sys
import torch, penstock, penstock.planner
from transformers import LlamaConfig, LlamaForCausalLM

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def planned(**sizes):
    ids = torch.zeros(8, 1024, dtype=torch.long)
    found = penstock.planner.plan(
        lambda: LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train(),
        torch.optim.AdamW,
        lambda: {"input_ids": ids, "labels": ids},
        machine="rtx4090-desktop",
        placement=penstock.Placement(params="cpu", grads="cpu", optimizer="cpu"),
    )
    gc.collect()
    return found

planned(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
before = resident()
planned(**json.loads(sys.argv[1]))
with open("/proc/self/status") as file:  # getrusage() would give that of the process that has started this one
    (high,) = [line for line in file if line.startswith("VmHWM")]
peak = 1024 * int(high.split()[1])
with open(sys.argv[2], "w") as file:
    json.dump({"taken": peak - before, "left": resident() - before, "peak": peak}, file)
"""

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}  # 1B
OTHERS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}


def test_planning_takes_less_than_a_gibibyte_and_leaves_nothing(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-c", SCRIPT, json.dumps(SIZES | OTHERS), str(found)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    memory = json.loads(found.read_text())
    assert memory["peak"] < MOST_BYTES
    assert memory["left"] < MOST_LEFT_BYTES
