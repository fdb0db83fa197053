"""Memory of the process over many steps of sequences of varying lengths, with malloc as it is: does it grow?

    python benchmarks/lengths.py                       # plain torch and penstock, a process each
    python benchmarks/lengths.py --contenders plain,before,penstock --before OTHER/src

The host pays for what a length leaves behind: an allocator may keep it, in holes that the next length does not fit
into. `files` has everything on nvme, `before` is penstock of another checkout. Bytes, not seconds: other work on the
machine changes nothing, and all run at once.

`ONEDNN_PRIMITIVE_CACHE_CAPACITY=64 LRU_CACHE_CAPACITY=64` has torch keep fewer compiled products, of which it makes one
for each length.
"""

import argparse
import json
import multiprocessing as mp
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import contenders
import machine
import step
import torch

MODEL = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=704, vocab_size=4000)
WINDOW = 20  # steps that a figure is the median, or the peak, of


def placement(name: str, folder: str) -> dict[str, Any]:
    """Where a contender has everything."""
    tier = "nvme" if name == "files" else "cpu"
    return dict(params=tier, grads=tier, optimizer=tier, nvme_path=folder)


def run(name: str, arguments: argparse.Namespace, folder: str, pipe: Any) -> None:
    """Take the steps, and send what was resident after each window of them."""
    torch.set_num_threads(arguments.threads)
    step.MODELS["lengths"] = MODEL
    device = torch.device("cpu")
    if name == "before":
        step.import_other(arguments.before)
    empty = machine.process_bytes("VmRSS")
    model = step.build_model("lengths", torch.bfloat16)
    if name == "plain":
        training = contenders.plain(model, device)
    else:
        training = contenders.penstock(model, device, placement=placement(name, folder))
    lengths = random.Random(0)
    generator = torch.Generator().manual_seed(1)
    resident: list[int] = []
    windows: list[dict[str, float]] = []
    for number in range(arguments.steps):
        if number % WINDOW == 0:
            machine.restart_peak()
            resident.clear()
        shape = (1, lengths.randint(arguments.shortest, arguments.longest))
        tokens = torch.randint(0, MODEL["vocab_size"], shape, generator=generator)
        loss = training.model(input_ids=tokens, labels=tokens).loss
        training.backward(loss)
        del loss
        training.step()
        resident.append(machine.process_bytes("VmRSS"))
        if number % WINDOW == WINDOW - 1:
            windows.append({"resident": statistics.median(resident), "peak": machine.process_bytes("VmHWM")})
    training.finish()
    pipe.send({"before_model": empty, "windows": windows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default="plain,penstock,files")
    parser.add_argument("--before", help="the `src` of another checkout, with a built extension beside its modules")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    found: dict[str, Any] = {}
    running = {}
    for name in arguments.contenders.split(","):
        mine, theirs = context.Pipe()
        process = context.Process(target=run, args=(name, arguments, arguments.folder, theirs))
        process.start()
        theirs.close()
        running[name] = mine, process
    for name, (mine, process) in running.items():
        found[name] = mine.recv()
        process.join()
        windows = found[name]["windows"]
        # The first window has the first steps in it: pages that are touched once.
        early, late = windows[1], windows[-1]
        ratios = {f"{key}_growth": late[key] / early[key] for key in early}
        found[name] |= ratios
        told = ", ".join(f"{key} {early[key] / 2**20:.0f} -> {late[key] / 2**20:.0f} MiB" for key in early)
        print(f"{name:<10} {told}; " + ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items()), flush=True)
    if arguments.out:
        settings = {key: getattr(arguments, key) for key in ("steps", "shortest", "longest", "threads")}
        report = {"machine": machine.describe(), "model": MODEL, "settings": settings, "contenders": found}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
