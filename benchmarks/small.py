"""What a step costs that computes next to nothing: milliseconds of the host for each layer of ten small parameters.

    python benchmarks/small.py                                  # 64 and 256 layers
    python benchmarks/small.py --layers 64 --profile "penstock nvme"      # where the time of a step goes, by function
    python benchmarks/small.py --before OTHER/src --contenders "plain,before cpu,penstock cpu"

Contenders are processes of their own that take turns: plain torch, FSDP2, and Penstock with everything on the device,
on the cpu tier, and with parameters, gradients and the optimizer's state in files. A turn is some steps, ended by
waiting for everything that still goes on. What a layer costs more among 256 than among 64 grows with their number.
`before` is Penstock of another checkout, whose sources hold a built extension.
"""

import argparse
import cProfile
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import contenders
import machine
import step
import torch
from contenders import Training
from torch import Tensor, nn
from turns import Figures, medians, take_turns

WIDTH = 16
TIERS = ("device", "cpu", "nvme")


class Layer(nn.Module):
    """Five linear layers, ten parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.steps:
            x = linear(x)
        return x


class Small(nn.Module):
    """Layers, where `contenders` looks for them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:
            x = x + layer(x)
        return x


def trained(training: Training, device: torch.device, settings: dict[str, Any]) -> Iterator[Figures]:
    """Some steps a turn; milliseconds of a layer in one of them, by phase."""
    batch = torch.ones(2, WIDTH, device=device, dtype=torch.bfloat16)
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    per = 1e3 / settings["steps"] / settings["layers"]
    message: Any = yield {}
    while message is not None:
        forward = backward = update = 0.0
        began = time.perf_counter()
        for _ in range(settings["steps"]):
            times = [time.perf_counter()]
            loss = training.model(batch).float().square().mean()
            times.append(time.perf_counter())
            training.backward(loss)
            times.append(time.perf_counter())
            training.step()
            times.append(time.perf_counter())
            del loss
            forward, backward, update = (
                so_far + stop - start
                for so_far, start, stop in zip((forward, backward, update), times, times[1:], strict=False)
            )
        training.finish()
        wait()
        total = time.perf_counter() - began
        phases = {"forward_ms": forward, "backward_ms": backward, "step_ms": update, "total_ms": total}
        message = yield {name: seconds * per for name, seconds in phases.items()}


def training_of(name: str, device: torch.device, settings: dict[str, Any]) -> Training:
    """A contender, prepared."""
    torch.manual_seed(0)
    model = Small(settings["layers"]).to(torch.bfloat16)
    if name == "plain":
        return contenders.plain(model, device)
    if name == "fsdp2":
        return contenders.fsdp2(model, device)
    tier = name.split()[1]
    placement = dict(params=tier, grads=tier, optimizer=tier, nvme_path=settings["folder"])
    return contenders.penstock(model, device, placement=placement, options={"update_threads": settings["threads"]})


def contender(name: str, **settings: Any) -> Iterator[Figures]:
    """A contender of `take_turns`."""
    if name.startswith("before"):
        step.import_other(settings["before"])
    device = step.device_of(settings)
    return trained(training_of(name, device, settings), device, settings)


NAMES = ("plain", "fsdp2", *(f"penstock {tier}" for tier in TIERS))
CONTENDERS: dict[str, Callable[..., Iterator[Figures]]] = {
    name: partial(contender, name) for name in (*NAMES, *(f"before {tier}" for tier in TIERS))
}


def profile(name: str, settings: dict[str, Any], lines: int) -> None:
    """Print the functions of the training thread that a contender's steps spend their time in, by layer and step."""
    device = step.device_of(settings)
    turns = trained(training_of(name, device, settings), device, settings)
    next(turns)
    for _ in range(2):
        turns.send("warm-up")
    profiler = cProfile.Profile()
    profiler.enable()
    turns.send("counted")
    profiler.disable()
    stats = pstats.Stats(profiler)
    stats.sort_stats("tottime").print_stats(lines)
    stats.sort_stats("cumtime").print_stats(lines)


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders take turns at each number of layers."""
    settings = {key: getattr(arguments, key) for key in ("steps", "threads", "folder")}
    settings["before"] = arguments.before and str(Path(arguments.before).resolve())
    chosen = {name: CONTENDERS[name] for name in arguments.contenders.split(",")}
    rounds: dict[str, dict[str, list[Figures]]] = {}
    for layers in arguments.layers:
        environment = {"OMP_NUM_THREADS": str(arguments.threads)}
        found = take_turns(chosen, arguments.rounds, arguments.warmup, environment, **settings, layers=layers)
        rounds[str(layers)] = found
        for name, figures in found.items():
            print(
                f"{layers:>4} layers, {name:<16}", *(f"{k} {v:7.3f}" for k, v in medians(figures).items()), flush=True
            )
    return {
        "machine": machine.describe(),
        "settings": settings | {"rounds": arguments.rounds},
        "medians": {layers: {n: medians(f) for n, f in found.items()} for layers, found in rounds.items()},
        "rounds": rounds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contenders", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--before", help="the `src` of another checkout, with a built extension beside its modules")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--profile", choices=NAMES, help="print where the time of one contender goes, and end")
    parser.add_argument("--lines", type=int, default=40, help="of the profile")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    if options.profile:
        given = {key: getattr(options, key) for key in ("steps", "threads", "folder")}
        for count in options.layers:
            profile(options.profile, given | {"layers": count}, options.lines)
    else:
        outcome = report(options)
        if options.out:
            options.out.write_text(json.dumps(outcome, indent=1) + "\n")
