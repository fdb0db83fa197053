"""One training step end to end: penstock against the same loop in plain torch, and against FSDP2 and DeepSpeed.

    python benchmarks/step.py                     # glibc as it is
    python benchmarks/step.py --malloc tuned      # no page faults for anybody
    python benchmarks/step.py --model tiny        # a quick look
    python benchmarks/step.py --tier nvme --folder /disk --contenders plain,disk,penstock,penstock8,deepspeed
    python benchmarks/step.py --tier files --folder /disk --contenders plain,memory,disk,penstock
    python benchmarks/step.py --before OTHER/src --contenders plain,before,penstock

bf16 weights, fp32 masters, AdamW, clipping at 1.0; a Llama-type model with random weights on random tokens. Contenders
are processes of their own that take turns. `benchmarks/results/` keeps the reports.

A turn is one step; with state on nvme it is several, ended by waiting for everything that still goes on,
so that what overlaps the next step is counted in full. `disk` is the limit there: it moves the bytes of those steps,
reads and writes mixed as a step mixes them, and nothing else. `penstock8` keeps the moments in 8 bits, `memory`
everything in memory. `before` is `penstock` of another checkout, whose sources hold a built extension; the tier `files`
is nvme for everything.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contenders
import machine
import torch
from contenders import Training
from turns import Figures, medians, paired_ratio, take_turns

MODELS = {
    "355m": dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=2560, vocab_size=32000
    ),
    "100m": dict(
        hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, intermediate_size=2560, vocab_size=16000
    ),
    "tiny": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=2000),
}


def build_model(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model with random weights, on the cpu."""
    import transformers

    config = transformers.LlamaConfig(**MODELS[name], max_position_embeddings=1024, use_cache=False)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).train()


def run(training: Training, device: torch.device, settings: dict[str, Any]) -> Iterator[Figures]:
    """Take some steps a turn; figures of one of them, in milliseconds and GiB."""
    vocabulary = MODELS[settings["model"]]["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    steps = settings["steps"]
    message = yield {}
    counting = False
    while True:
        if message == "counted" and not counting:
            machine.restart_peak()
            counting = True
        phases = {"forward_ms": 0.0, "backward_ms": 0.0, "step_ms": 0.0}
        wait()
        started, cpu_started, disk_started = time.perf_counter(), time.process_time(), machine.disk_bytes()
        for _ in range(steps):
            shape = (settings["batch"], settings["sequence"])
            tokens = torch.randint(0, vocabulary, shape, generator=generator).to(device)
            times = [time.perf_counter()]
            loss = training.model(input_ids=tokens, labels=tokens).loss
            wait()
            times.append(time.perf_counter())
            training.backward(loss)
            wait()
            times.append(time.perf_counter())
            training.step()
            wait()
            times.append(time.perf_counter())
            value = float(loss.detach())
            del loss
            for phase, begin, end in zip(phases, times, times[1:], strict=False):
                phases[phase] += (end - begin) * 1e3 / steps
        training.finish()
        done = time.perf_counter()
        read, written = (now - before for now, before in zip(machine.disk_bytes(), disk_started, strict=True))
        message = yield phases | {
            "total_ms": (done - started) * 1e3 / steps,
            "cpu_ms": (time.process_time() - cpu_started) * 1e3 / steps,
            "peak_gib": machine.process_bytes("VmHWM") / 2**30,
            "device_peak_gib": torch.get_device_module(device).max_memory_allocated() / 2**30
            if device.type != "cpu"
            else 0.0,
            "disk_read_mb": read / 1e6 / steps,
            "disk_written_mb": written / 1e6 / steps,
            "loss": value,
        }


def device_of(settings: dict[str, Any]) -> torch.device:
    """The accelerator, unless there is none or the cpu was asked for; sets the threads."""
    torch.set_num_threads(settings["threads"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def prepared_once(prepare: Callable[..., Training], **settings: Any) -> Iterator[Figures]:
    """A contender: prepared once, then steps."""
    device = device_of(settings)
    training = prepare(build_model(settings["model"], torch.bfloat16), device, settings)
    yield from run(training, device, settings)


def plain(**settings: Any) -> Iterator[Figures]:
    """Plain torch."""
    return prepared_once(lambda model, device, _: contenders.plain(model, device), **settings)


#: Where the benchmark's tiers have parameters and gradients, and the optimizer.
TIERS = {"cpu": ("cpu", "cpu"), "device": ("device", "device"), "nvme": ("cpu", "nvme"), "files": ("nvme", "nvme")}

#: Bytes per parameter that a step reads from files and writes to them.
DISK_BYTES = {"nvme": (10, 10), "files": (16, 14)}


def penstock(state_dtype: str = "fp32", **settings: Any) -> Iterator[Figures]:
    """Stage 3, everything on one tier; with nvme, the optimizer there and the rest on the cpu."""

    def prepare(model: torch.nn.Module, device: torch.device, settings: dict[str, Any]) -> Training:
        rest, optimizer = TIERS[settings["tier"]]
        return contenders.penstock(
            model,
            device,
            placement=dict(params=rest, grads=rest, optimizer=optimizer, nvme_path=settings["folder"]),
            overlap="forward" if optimizer == "nvme" else "auto",
            options=dict(update_threads=settings["threads"], state_dtype=state_dtype),
        )

    return prepared_once(prepare, **settings)


def penstock8(**settings: Any) -> Iterator[Figures]:
    """The same with 8-bit moments."""
    return penstock(state_dtype="int8", **settings)


def memory(**settings: Any) -> Iterator[Figures]:
    """The same with everything on the cpu tier: what a step with files takes to compute."""
    return penstock(**settings | {"tier": "cpu"})


def import_other(sources: str) -> None:
    """Have this process import penstock from the sources of another checkout."""
    # What an editable installation has put there finds this checkout's modules before any path is asked.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, sources)
    import penstock as other

    assert other.__file__ is not None
    assert Path(other.__file__).is_relative_to(Path(sources).resolve()), other.__file__


def before(**settings: Any) -> Iterator[Figures]:
    """Penstock of another checkout."""
    import_other(settings["before"])
    return penstock(**settings)


def disk(**settings: Any) -> Iterator[Figures]:
    """Reads and writes the bytes of a step, in records of a tile, and computes nothing.

    Per parameter 10 + 10 for the optimizer; with everything in files 16 + 14.
    """
    from penstock.runtime.aio import File, Queue
    from penstock.runtime.host_memory import page_aligned

    numel = sum(p.numel() for p in build_model(settings["model"], torch.bfloat16).parameters())
    record = 5 * (4 << 20)
    reads, writes = (bytes_each * numel // record for bytes_each in DISK_BYTES[settings["tier"]])
    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        file = File(Queue(32), Path(folder, "limit"), reads * record)
        slots = [page_aligned(record) for _ in range(8)]
        for index in range(reads):
            file.write(index * record, slots[index % 8]).wait()
        message = yield {}
        while message is not None:
            started = time.perf_counter()
            under_way: list[Any] = [None] * 8
            total = settings["steps"] * reads
            for index in range(total + 4):
                if index < total:
                    slot = index % 8
                    if under_way[slot] is not None:
                        under_way[slot].wait()
                    under_way[slot] = file.read(index % reads * record, slots[slot])
                back = index - 4
                if back >= 0 and back * writes // reads != (back + 1) * writes // reads:  # fewer writes than reads
                    slot = back % 8
                    under_way[slot].wait()
                    under_way[slot] = file.write(back % reads * record, slots[slot])
            for transfer in filter(None, under_way):
                transfer.wait()
            elapsed = (time.perf_counter() - started) * 1e3 / settings["steps"]
            message = yield {
                "total_ms": elapsed,
                "disk_read_mb": reads * record / 1e6,
                "disk_written_mb": writes * record / 1e6,
                **dict.fromkeys(("forward_ms", "backward_ms", "step_ms", "cpu_ms", "peak_gib"), 0.0),
            }


def fsdp2(**settings: Any) -> Iterator[Figures]:
    """FSDP2 with CPUOffloadPolicy."""
    return prepared_once(lambda model, device, _: contenders.fsdp2(model, device), **settings)


def deepspeed(**settings: Any) -> Iterator[Figures]:
    """ZeRO-3, everything offloaded to the cpu, or the optimizer to nvme."""

    def prepare(model: torch.nn.Module, device: torch.device, settings: dict[str, Any]) -> Training:
        if settings["tier"] == "nvme":
            return contenders.deepspeed(
                model, device, batch=settings["batch"], optimizer="nvme", params=None, folder=settings["folder"]
            )
        return contenders.deepspeed(model, device, batch=settings["batch"], optimizer="cpu", params="cpu")

    return prepared_once(prepare, **settings)


CONTENDERS = {
    "plain": plain,
    "memory": memory,
    "before": before,
    "penstock": penstock,
    "penstock8": penstock8,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "disk": disk,
}


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the contenders and compare them with plain torch."""
    settings = {key: getattr(arguments, key) for key in ("model", "batch", "sequence", "threads", "tier", "steps")}
    settings["steps"] = settings["steps"] or (4 if arguments.tier in ("nvme", "files") else 1)
    settings |= {"folder": arguments.folder, "before": arguments.before and str(Path(arguments.before).resolve())}
    environment = {"OMP_NUM_THREADS": str(arguments.threads)}
    if arguments.malloc == "tuned":
        environment |= machine.TUNED_MALLOC
    chosen = {name: CONTENDERS[name] for name in arguments.contenders.split(",")}
    figures = take_turns(chosen, arguments.rounds, arguments.warmup, environment, **settings)
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "settings": settings | {"malloc": arguments.malloc, "rounds": arguments.rounds},
        "medians": {name: medians(rows) for name, rows in figures.items()},
        "ratios": {
            f"{name} / {base}": {
                key: paired_ratio(figures, name, base, key)
                for key in ("total_ms", "cpu_ms", "peak_gib")
                if all(row[key] for row in (*figures[name], *figures[base]))
            }
            for name in figures
            for base in figures
            if name != base
        },
        "rounds": figures,
    }
    columns = ("forward", "backward", "step", "total ms", "peak GiB", "read MB", "written MB")
    keys = ("forward_ms", "backward_ms", "step_ms", "total_ms", "peak_gib", "disk_read_mb", "disk_written_mb")
    print(f"{'contender':<12}" + "".join(f"{column:>11}" for column in columns))
    for name, row in result["medians"].items():
        print(f"{name:<12}" + "".join(f"{row[key]:>11.{2 if key == 'peak_gib' else 0}f}" for key in keys))
    for pair, ratios in result["ratios"].items():
        print(f"{pair:<24}" + "".join(f"  {key} {ratio:.3f}" for key, ratio in ratios.items()))
    return result


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="355m")
    parser.add_argument("--contenders", default="plain,penstock", help="comma-separated: " + ",".join(CONTENDERS))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--before", help="the `src` of another checkout, with a built extension beside its modules")
    parser.add_argument("--steps", type=int, help="steps of a turn")
    parser.add_argument("--malloc", choices=("default", "tuned"), default="default")
    parser.add_argument("--tier", choices=TIERS, default="cpu", help="home of penstock's state")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
