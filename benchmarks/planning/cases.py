"""The stored cases: each is planned anew, beside the placement that a linear programme found for it.

Until 0.3 fractions were the solution of a linear programme, rounded and repaired. `results/plan-cases.json` keeps its
placements: `linear` of a row. Both steps come from one simulator, so their ratio tells searches apart and nothing else.
"""

import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock import Placement
from penstock.planner import Machine, plan
from penstock.planner.plan_request import made, plan_request
from penstock.planner.search import Choice
from penstock.planner.simulation.simulate import Setup
from penstock.planner.trials import Trials
from planning.models import batch, gpt2, large, llama

RESULTS = Path(__file__).parents[1] / "results" / "plan-cases.json"
GIB = 1 << 30
#: What a machine does in a second that counts where latencies do not.
_RATES = ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "duplex", "host_bandwidth", "update")
_RATES += ("disk_read", "disk_write", "disk_mixed", "flops_bfloat16", "flops_float32", "device_bandwidth")
_RATES += ("device_update",)


def experts() -> torch.nn.Module:
    """A small Mixtral."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, vocab_size=32000)
    heads: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4, use_cache=False)
    config = MixtralConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2)
    config.dtype = torch.bfloat16
    return MixtralForCausalLM(config)


MODELS = {"llama": llama, "gpt2": gpt2, "experts": experts}


def machine_of(name: str) -> Machine:
    """Read a machine; "slow" is a desktop that is slow for a small model, so that bytes count and latencies do not."""
    if name != "slow":
        return Machine.read(name)
    machine = Machine.read("rtx4090-desktop")
    return machine.replace(**{rate: machine.value(rate) / 1000 for rate in _RATES if machine.has(rate)})


def _case(name: str, model: str, machine: str, sequences: int = 1, length: int = 2048, **limits: int) -> dict[str, Any]:
    return dict(name=name, model=model, machine=machine, sequences=sequences, length=length, limits=limits)


def _small(model: str, device: int, host: int = 0) -> dict[str, Any]:
    limits = {"device_bytes": device << 10} | ({"host_bytes": host << 10} if host else {})
    words = f"{model}, {device} KiB of device" + (f", {host} KiB of host" if host else "")
    return _case(words, model, "slow", 8, 32, **limits)


CASES = [
    *(_small("llama", device) for device in (900, 1800, 3000)),
    *(_small("gpt2", device) for device in (1500, 3000, 6000)),
    _small("llama", 900, 1500),
    _small("gpt2", 1500, 3000),
    _case("355m, 3 GiB of device", "355m", "rtx3090-desktop", 4, 1024, device_bytes=3 * GIB),
    _case("355m, 6 GiB of device", "355m", "rtx3090-desktop", 4, 1024, device_bytes=6 * GIB),
    _case(
        "355m, 4 GiB of device, 4 GiB of host",
        "355m",
        "rtx3090-desktop",
        4,
        1024,
        device_bytes=4 * GIB,
        host_bytes=4 * GIB,
    ),
    _case("355m on a laptop, 6 GiB", "355m", "cpu-laptop", 1, 512, host_bytes=6 * GIB),
    _case("1b, 12 GiB of device", "1b", "rtx4090-desktop", 4, device_bytes=12 * GIB),
    _case(
        "1b, 8 GiB of device, 12 GiB of host",
        "1b",
        "rtx4090-desktop",
        2,
        device_bytes=8 * GIB,
        host_bytes=12 * GIB,
    ),
    _case("1b, 3 micro-batches", "1b", "rtx3090-desktop", 2, 1024, device_bytes=10 * GIB, micro_batches=3),
    _case("1b, 4 ranks", "1b", "l40s-server", 4, device_bytes=10 * GIB, world_size=4),
    _case("experts, 4 GiB of device", "experts", "rtx3090-desktop", 4, 512, device_bytes=4 * GIB),
    *(
        _case(f"8b on {machine}", "8b", machine)
        for machine in (
            *("rtx4090-desktop", "rtx5090-desktop", "rtx3090-desktop", "l40s-server", "a100-40gb-node"),
            *("a100-80gb-node", "h100-node", "h200-node", "gh200-node", "h100-server"),
        )
    ),
    _case("8b on rtx4090-desktop, 48 GiB of host", "8b", "rtx4090-desktop", host_bytes=48 * GIB),
    _case("8b on rtx4090-desktop, 4 sequences", "8b", "rtx4090-desktop", 4),
    _case("70b, 8 ranks on h100-node", "70b", "h100-node", world_size=8),
    _case("70b, 8 ranks on a100-40gb-node", "70b", "a100-40gb-node", world_size=8),
    _case("70b, 16 ranks on 2 h100-nodes", "70b", "h100-node", world_size=16, hosts=2),
]


def row(case: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    """Plan a case, and time the linear programme's placement by the same simulator."""
    model = MODELS.get(case["model"]) or partial(large, case["model"])
    inputs, machine = partial(batch, case["sequences"], case["length"]), machine_of(case["machine"])
    began = time.process_time()
    found = plan(model, torch.optim.AdamW, inputs, machine=machine, **case["limits"])
    told = dict(name=case["name"], fits=found.fits, step_s=found.step_s, cpu_s=time.process_time() - began)
    if linear["fits"]:
        placed = Placement(**linear["placement"])
        request = plan_request(
            Setup(made(model), torch.optim.AdamW, inputs, hosts=1), machine=machine, arguments={}, **case["limits"]
        )
        trial = Trials(request).run(placed, Choice(placed.activations, linear["recompute"], linear["streamed"]))
        told |= dict(linear_step_s=trial.timing.step_s, linear_excess=request.limits.excess(trial.peak_bytes))
        told |= dict(ratio=found.step_s / trial.timing.step_s) if found.fits else {}
    choice = dict(recompute=found.recompute, streamed=found.options.streamed_updates)
    return told | dict(placement=json.loads(found.to_json())["placement"], **choice, linear=linear)


def cases(only: str = "") -> dict[str, Any]:
    """Plan all cases, or those whose name has some words in it; others stay as they are in the file."""
    told = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    known = [case for case in CASES if case["name"] in told]
    for case in known:
        if only in case["name"]:
            told[case["name"]] = row(case, told[case["name"]]["linear"])
            print({name: value for name, value in told[case["name"]].items() if name != "linear"}, flush=True)
    rows = [told[case["name"]] for case in known]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return {"worst": max(ratios), "median": median(ratios), "rows": rows}
