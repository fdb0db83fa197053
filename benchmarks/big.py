"""Steps of a model that does not fit: everything on nvme, under a hard limit of memory.

    python benchmarks/big.py --folder /disk --limit-gib 6 --out benchmarks/results/big.json

A Llama-type model of 1.36 billion parameters with random weights: 16 bytes of training state for each, 21.8 GB. The
limit is a memory control group where this user may make one, else the address space (ulimit -v): the process is killed,
or its allocations fail, when it needs more.
"""

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine

SHAPE = dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, intermediate_size=5632, vocab_size=32000)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[str]:
    """Limit this process's memory; gives how."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"penstock-big-{os.getpid()}")
        try:
            group.mkdir()
            (group / name).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield f"control group, {name}"
        finally:
            Path(root, "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
        return
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    yield "address space"


def train(folder: str, sequence: int, steps: int) -> dict[str, Any]:
    """Take the steps; figures of each."""
    import torch
    import transformers

    import penstock

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, use_cache=False, max_position_embeddings=sequence)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    started = time.perf_counter()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        placement=penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", nvme_path=folder),
        max_grad_norm=1.0,
        options=penstock.Options(live_bytes=1 << 30, prefetch_bytes=256 << 20),
    )
    prepared = time.perf_counter() - started
    prepare_peak = machine.process_bytes("VmHWM")
    print(optimizer.locations(), flush=True)
    machine.restart_peak()
    tokens = torch.randint(0, config.vocab_size, (1, sequence))
    rows = []
    for _ in range(steps):
        before, begin = machine.disk_bytes(), time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.backward(loss)
        result = optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        read, written = (now - then for now, then in zip(machine.disk_bytes(), before, strict=True))
        rows.append(
            {
                "loss": float(loss.detach()),
                "grad_norm": result.grad_norm,
                "seconds": round(time.perf_counter() - begin, 2),
                "read_bytes_per_parameter": round(read / numel, 3),
                "written_bytes_per_parameter": round(written / numel, 3),
            }
        )
        print(rows[-1], flush=True)
    found = {
        "parameters": numel,
        "prepare_seconds": round(prepared, 1),
        "prepare_peak_gib": round(prepare_peak / 2**30, 2),
        "steps_peak_gib": round(machine.process_bytes("VmHWM") / 2**30, 2),
        "steps": rows,
    }
    optimizer.close(keep_params=False)
    return found


def main() -> None:
    """Read the command line, train, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk; 23 GB are needed")
    parser.add_argument("--limit-gib", type=float, default=6.0)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with limited(int(arguments.limit_gib * 2**30)) as how:
        found = train(arguments.folder, arguments.sequence, arguments.steps)
    found = {"machine": machine.describe(), "limit_gib": arguments.limit_gib, "limited_by": how, **found}
    print(json.dumps({key: value for key, value in found.items() if key != "machine"}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
