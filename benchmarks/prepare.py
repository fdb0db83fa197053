"""`prepare` of a model on the meta device with the values of a folder, against the bare disk and a plain load.

    python benchmarks/prepare.py                        # 100M parameters in bf16
    python benchmarks/prepare.py --model 1.3b           # 2.7 GB in files

Contenders are processes of their own that take turns; the page cache is dropped before each turn. `disk` reads as many
bytes past the page cache into four buffers, and nothing else; `fresh` does it into memory that is mapped for it, which
is what no loader can be faster than; `safetensors` loads the files and assigns the values to
the model; `penstock` prepares training with everything on the cpu tier. `over_plan_units` is what the process held at
its peak beyond what the plan says it keeps (of which the moments are not written yet, and take nothing), and
`passing_units` beyond what it holds when it is done, in units of the model (the largest one).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import checkpoint
import contenders
import machine
import step
import torch
from turns import Figures, medians, paired_ratio, take_turns

SHARD_BYTES = 512 << 20
BUFFERS = 4  # reads that are in flight at once
step.MODELS |= {
    "1.3b": dict(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, intermediate_size=5504, vocab_size=32000
    ),
}


def fake(name: str) -> torch.nn.Module:
    """The model without values."""
    import transformers

    config = transformers.LlamaConfig(**step.MODELS[name], max_position_embeddings=1024, use_cache=False)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def write_folder(model: torch.nn.Module, folder: Path) -> int:
    """Write values for a model on the meta device, a file at a time as they get full; returns the bytes written."""
    from safetensors.torch import save_file

    values: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    nbytes = count = 0

    def end_file() -> None:
        nonlocal count, nbytes
        path = folder / f"model-{count:05}.safetensors"
        save_file(values, path)
        where.update(dict.fromkeys(values, path.name))
        nbytes += path.stat().st_size
        count += 1
        values.clear()

    for key, parameter in model.named_parameters():
        values[key] = torch.empty(parameter.shape, dtype=parameter.dtype).uniform_(-0.02, 0.02)
        if sum(value.nbytes for value in values.values()) >= SHARD_BYTES:
            end_file()
    if values:
        end_file()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return nbytes


def timed_turns(turn: Any, settings: dict[str, Any]) -> Iterator[Figures]:
    """Take turns that read the folder anew; seconds, and what the turn says of memory."""
    message = yield {}
    while message is not None:
        checkpoint.drop_cache(Path(settings["values"]))
        os.sync()
        started = time.perf_counter()
        done = turn()
        seconds = time.perf_counter() - started
        message = yield {"seconds": seconds, **done()}


def read_all(folder: Path, buffers: Iterator[torch.Tensor]) -> None:
    """Read the files in chunks, four at once, past the page cache."""
    from penstock.runtime.aio import File, Queue

    with Queue(8) as queue:
        for path in sorted(folder.glob("*.safetensors")):
            with File.existing(queue, path) as file:
                under_way: list[Any] = []
                for at in range(0, file.size, checkpoint.CHUNK_BYTES):
                    if len(under_way) == BUFFERS:
                        under_way.pop(0).wait()
                    nbytes = min(checkpoint.CHUNK_BYTES, file.size - at) // 4096 * 4096
                    if nbytes:
                        under_way.append(file.read(at, next(buffers)[:nbytes]))
                for transfer in under_way:
                    transfer.wait()


def disk(**settings: Any) -> Iterator[Figures]:
    """Read into buffers that are there."""
    from penstock.runtime.host_memory import page_aligned

    step.device_of(settings)
    buffers = [page_aligned(checkpoint.CHUNK_BYTES).fill_(1) for _ in range(BUFFERS)]

    def turn() -> Any:
        read_all(Path(settings["values"]), cycle(buffers))
        return dict

    return timed_turns(turn, settings)


def fresh(**settings: Any) -> Iterator[Figures]:
    """Read into memory that is mapped for it."""
    from penstock.runtime.host_memory import page_aligned

    step.device_of(settings)
    folder = Path(settings["values"])
    chunks = sum(-(-path.stat().st_size // checkpoint.CHUNK_BYTES) for path in folder.glob("*.safetensors"))

    def turn() -> Any:
        memory = page_aligned(chunks * checkpoint.CHUNK_BYTES)
        read_all(folder, iter(memory.split(checkpoint.CHUNK_BYTES)))
        return dict

    return timed_turns(turn, settings)


def safetensors(**settings: Any) -> Iterator[Figures]:
    """Load the files as they are, and assign the values."""
    from safetensors.torch import load_file

    step.device_of(settings)

    def turn() -> Any:
        model = fake(settings["model"])
        for path in sorted(Path(settings["values"]).glob("*.safetensors")):
            found = {key: value.clone() for key, value in load_file(path).items()}  # else nothing is read yet
            model.load_state_dict(found, strict=False, assign=True)
        return dict

    return timed_turns(turn, settings)


def penstock(**settings: Any) -> Iterator[Figures]:
    """Prepare training, everything on the cpu tier."""
    import penstock as ours
    from penstock.footprint import footprint

    step.device_of(settings)
    arguments: dict[str, Any] = dict(
        placement=ours.Placement(params="cpu", grads="cpu", optimizer="cpu"), weights=settings["values"]
    )

    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **contenders.HYPER)

    model = fake(settings["model"])
    planned = footprint(model, optimizer_of(model), **arguments)
    of_units: dict[str, int] = {}
    for row in planned.at_rest.rows:
        if row.kind == "param":
            of_units[row.unit] = of_units.get(row.unit, 0) + row.nbytes

    def turn() -> Any:
        model = fake(settings["model"])
        machine.restart_peak()
        before = machine.process_bytes("VmRSS")
        prepared = ours.prepare(model, optimizer_of(model), **arguments)

        def done() -> Figures:
            peak, unit = machine.process_bytes("VmHWM"), max(of_units.values())
            over, passing = peak - before - planned.at_rest.bytes(tier="cpu"), peak - machine.process_bytes("VmRSS")
            prepared.close(keep_params=False)
            return {"over_plan_units": over / unit, "passing_units": passing / unit, "unit_bytes": float(unit)}

        return done

    return timed_turns(turn, settings)


CONTENDERS = {"disk": disk, "fresh": fresh, "safetensors": safetensors, "penstock": penstock}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the folder, take turns, and compare."""
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="penstock-prepare-") as folder:
        nbytes = write_folder(fake(arguments.model), Path(folder))
        settings = {"model": arguments.model, "threads": arguments.threads, "values": folder}
        environment = {"OMP_NUM_THREADS": str(arguments.threads)}
        rounds = take_turns(CONTENDERS, arguments.rounds, 1, environment, **settings)
    found = {name: medians(figures) for name, figures in rounds.items()}
    for name, row in found.items():
        speed = f"{nbytes / row['seconds'] / 1e9:6.2f} GB/s"
        more = "".join(f"  {key} {row[key]:.2f}" for key in ("over_plan_units", "passing_units") if key in row)
        print(f"{name:<12}{row['seconds']:>8.3f} s {speed}{more}", flush=True)
    ratios = {
        f"{name} / {base}": paired_ratio(rounds, name, base, "seconds")
        for base in ("disk", "fresh", "safetensors")
        for name in rounds
        if base in rounds and name != base
    }
    for pair, ratio in ratios.items():
        print(f"{pair:<28}{ratio:.2f} of its time, {1 / ratio:.2f} of its speed")
    return {
        "machine": machine.describe(),
        "settings": {"model": arguments.model, "threads": arguments.threads, "rounds": arguments.rounds},
        "bytes": nbytes,
        "medians": found,
        "time_ratios": ratios,
        "rounds": rounds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=step.MODELS, default="100m")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
