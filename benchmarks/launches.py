"""What the host gives a device to do in one step: launches, waits and bytes, counted on the strict test device.

    python benchmarks/launches.py             # writes benchmarks/results/launches.json

A Llama-type model of 8 layers, bf16 compute with fp32 masters, one rank. `tests/device` counts everything that is
enqueued and every wait of the host, and models time: copies take bytes / bandwidth each way, kernels and the host none.
So these are counts and not measurements, the same on every machine; a GPU says what they cost.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import machine  # noqa: E402
import torch  # noqa: E402

from tests.device.building import build  # noqa: E402
from tests.device.loading import load  # noqa: E402

DEVICE = "strict:0"
BYTES_PER_SECOND = 25e9
STEPS = 4  # the last one is counted: orders are learned, state exists
PLACEMENTS: dict[str, dict[str, Any]] = {
    "penstock, device": {},
    "penstock, optimizer on cpu": {"grads": "cpu", "optimizer": "cpu"},
    "penstock, everything on cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "penstock, everything on cpu, streamed": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
}
CONTENDERS = ("plain torch, fused AdamW", "FSDP2", "FSDP2, CPU offload", *PLACEMENTS)


def make_model() -> torch.nn.Module:
    """8 layers, 75 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def plain() -> tuple[torch.nn.Module, Any]:
    """Weights and state on the device, in bf16."""
    model = make_model().to(DEVICE, torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def fsdp2(*, offload: bool) -> tuple[torch.nn.Module, Any]:
    """One rank of FSDP2, sharded by layer."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    import tests.device.collectives  # noqa: F401 - registers the process group

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("late", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    mesh = init_device_mesh("strict", (1,))
    policies = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True) if offload else OffloadPolicy(),
    }
    model = make_model() if offload else make_model().to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def penstock_on(name: str) -> tuple[torch.nn.Module, Any]:
    """Penstock with a placement."""
    import penstock

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = penstock.Options(streamed_updates=0.5 if name.endswith("streamed") else 0.0)
    return model, penstock.prepare(model, optimizer, placement=penstock.Placement(**PLACEMENTS[name]), options=options)


def count(name: str) -> dict[str, Any]:
    """One contender's step."""
    load(build())
    from tests.device.backend import native

    torch.set_num_threads(1)
    if name.startswith("plain"):
        model, optimizer = plain()
    elif name.startswith("FSDP2"):
        model, optimizer = fsdp2(offload="offload" in name)
    else:
        model, optimizer = penstock_on(name)
    numel = sum(parameter.numel() for parameter in model.parameters())
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    found: dict[str, Any] = {}
    for step in range(STEPS):
        torch.accelerator.synchronize()
        if step == STEPS - 1:
            native.model_time(BYTES_PER_SECOND, 0.0, True)
        for forget in (native.take_waits, native.take_launches, native.take_copied, native.take_spans):
            forget()
        begin.record()
        model(input_ids=ids, labels=ids).loss.backward()
        end.record()
        found["forward_backward"] = counted(native)
        spans = native.take_spans()
        optimizer.step()
        found["step"] = counted(native)
        optimizer.zero_grad()
        torch.accelerator.synchronize()
    found["parameters"], found["elements"] = len(list(model.parameters())), numel
    found["modelled_seconds"] = begin.elapsed_time(end) / 1e3
    found["seconds_of_copies_up"] = sum(stop - start for _, what, start, stop, _ in spans if what.startswith("copy up"))
    if hasattr(optimizer, "close"):
        optimizer.close()
    return found


def counted(native: Any) -> dict[str, Any]:
    """What was counted since the last look; memory given up is no launch."""
    torch_waits = native.take_waits()
    launches = {name: number for name, number in native.take_launches().items() if name != "(given up)"}
    copied = native.take_copied()
    return {
        "launches": sum(launches.values()),
        "by_operator": dict(Counter(launches).most_common(12)),
        "waits": torch_waits,
        "bytes_up": copied.get("up", 0),
        "bytes_down": copied.get("down", 0),
    }


def main() -> None:
    """Count every contender, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "launches.json")
    parser.add_argument("--one", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.one:
        arguments.out.write_text(json.dumps(count(arguments.one)))
        return
    rows: dict[str, Any] = {}
    for name in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "row.json")
            command = [sys.executable, "-W", "ignore", __file__, "--one", name, "--out", str(out)]
            done = subprocess.run(command, check=False)
            rows[name] = json.loads(out.read_text()) if done.returncode == 0 else {"failed": done.returncode}
        row = rows[name]
        if "failed" not in row:
            print(line(name, row, rows[CONTENDERS[0]]))
    report = {"machine": machine.describe(), "bytes_per_second": BYTES_PER_SECOND, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def line(name: str, row: dict[str, Any], of_plain: dict[str, Any]) -> str:
    """A row of the table."""
    both, step = row["forward_backward"], row["step"]
    more = (both["launches"] - of_plain["forward_backward"]["launches"]) / row["parameters"]
    elements = row["elements"]
    return (
        f"| {name} | {more:.1f} | {sum(both['waits'].values())} | {both['bytes_up'] / elements:.2f} | "
        f"{both['bytes_down'] / elements:.2f} | {step['launches'] / row['parameters']:.2f} | "
        f"{sum(step['waits'].values())} |"
    )


if __name__ == "__main__":
    main()
