"""A step with Muon, everything on the cpu tier, beside plain torch's two classes; and the loss of both over 300 steps.

    python benchmarks/muon.py                          # the Llama-type model of benchmarks/step.py
    python benchmarks/muon.py --layers 6               # a part of it, where five iterations of products take long
    python benchmarks/muon.py --curve 300 --out FILE   # a small model on the text of Python's standard library

bf16 weights and gradients, fp32 masters, momentum in fp32, `adjust_lr_fn="match_rms_adamw"`, clipping at 1.0. Plain
torch keeps masters that `torch.optim.Muon` (matrices) and `torch.optim.AdamW` (the rest) step. Contenders are processes
of their own that take turns.
"""

import argparse
import copy
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import step as steps
import torch
from contenders import MAX_GRAD_NORM, Training
from turns import Figures, medians, paired_ratio, take_turns

from penstock.optim import MuonAdamW

HYPER = dict(lr=1e-3, weight_decay=0.1)
CURVE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160, vocab_size=256)
ROWS, LENGTH = 4, 96  # of a batch of the curve


def groups_of(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The matrices that Muon updates, and what AdamW does."""
    groups = MuonAdamW(model, **HYPER).param_groups
    chosen = {rule: [p for g in groups if g["rule"] == rule for p in g["params"]] for rule in ("muon", "adamw")}
    return chosen["muon"], chosen["adamw"]


def plain(model: torch.nn.Module) -> Training:
    """bf16 weights and gradients, fp32 masters, torch's two classes."""
    matrices, others = groups_of(model)
    parameters = [*matrices, *others]
    masters = [p.detach().float() for p in parameters]
    muon = torch.optim.Muon(masters[: len(matrices)], adjust_lr_fn="match_rms_adamw", **HYPER)
    adamw = torch.optim.AdamW(masters[len(matrices) :], fused=True, **HYPER)

    @torch.no_grad()
    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, MAX_GRAD_NORM)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(parameters, masters)

    return Training(model, torch.Tensor.backward, step)


def penstock(model: torch.nn.Module, placement: dict[str, Any], threads: int) -> Training:
    """Stage 3 with `MuonAdamW`."""
    import penstock as library

    optimizer = library.prepare(
        model,
        MuonAdamW(model, **HYPER),
        placement=library.Placement(**placement),
        max_grad_norm=MAX_GRAD_NORM,
        options=library.Options(update_threads=threads),
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer.backward, step, optimizer.synchronize)


def _turns(name: str, settings: dict[str, Any]) -> Iterator[Figures]:
    device = steps.device_of(settings)
    steps.MODELS[settings["model"]]["num_hidden_layers"] = settings["layers"]
    model = steps.build_model(settings["model"], torch.bfloat16)
    storage = dict(params="cpu", grads="cpu", optimizer="cpu")
    training = plain(model) if name == "plain" else penstock(model, storage, settings["threads"])
    yield from steps.run(training, device, settings)


def plain_turns(**settings: Any) -> Iterator[Figures]:
    """Plain torch."""
    return _turns("plain", settings)


def penstock_turns(**settings: Any) -> Iterator[Figures]:
    """Everything on the cpu tier."""
    return _turns("penstock", settings)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps in turns."""
    settings = {key: getattr(arguments, key) for key in ("model", "layers", "batch", "sequence", "threads")}
    settings |= {"steps": 1, "layers": arguments.layers or steps.MODELS[arguments.model]["num_hidden_layers"]}
    environment = {"OMP_NUM_THREADS": str(arguments.threads)}
    contenders = {"plain": plain_turns, "penstock": penstock_turns}
    figures = take_turns(contenders, arguments.rounds, arguments.warmup, environment, **settings)
    ratios = {key: paired_ratio(figures, "penstock", "plain", key) for key in ("total_ms", "step_ms", "peak_gib")}
    for name, rows in figures.items():
        print(name, {key: round(value, 2) for key, value in medians(rows).items()})
    print("penstock / plain", {key: round(value, 3) for key, value in ratios.items()})
    return {
        "machine": machine.describe() | {"load": os.getloadavg()},
        "settings": settings | {"rounds": arguments.rounds},
        "medians": {name: medians(rows) for name, rows in figures.items()},
        "ratios": {"penstock / plain": ratios},
        "rounds": figures,
    }


def text() -> torch.Tensor:
    """The bytes of a part of Python's standard library, files in order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)[: 2 << 20]), dtype=torch.long)


def curve(count: int, *, placement: dict[str, Any], threads: int) -> dict[str, Any]:
    """Losses of a small model, by plain torch and with the optimizer in files, on the same batches."""
    torch.set_num_threads(threads)
    steps.MODELS["curve"] = CURVE
    first = steps.build_model("curve", torch.bfloat16)
    data, generator = text(), torch.Generator().manual_seed(2)
    starts = torch.randint(0, len(data) - LENGTH, (count, ROWS), generator=generator)
    losses: dict[str, list[float]] = {}
    for name in ("plain", "penstock"):
        model = copy.deepcopy(first)
        training = plain(model) if name == "plain" else penstock(model, placement, threads)
        losses[name] = []
        for row in starts:
            ids = torch.stack([data[start : start + LENGTH] for start in row.tolist()])
            loss = training.model(input_ids=ids, labels=ids).loss
            losses[name].append(float(loss.detach()))
            training.backward(loss)
            training.step()
        training.finish()
    pairs = list(zip(losses["plain"], losses["penstock"], strict=True))
    return {
        "machine": machine.describe(),
        "settings": {
            "model": CURVE,
            "steps": count,
            "batch": ROWS,
            "sequence": LENGTH,
            "placement": "optimizer on nvme",
        },
        "losses": losses,
        "largest difference": max(abs(ours - theirs) for theirs, ours in pairs),
        "mean of the last 50": {name: sum(values[-50:]) / len(values[-50:]) for name, values in losses.items()},
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=steps.MODELS, default="355m")
    parser.add_argument("--layers", type=int, default=0, help="of the model; all of them unless it is said")
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS", help="the loss of so many steps instead")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    if options.curve:
        with tempfile.TemporaryDirectory() as folder:
            storage = dict(params="cpu", grads="cpu", optimizer="nvme", nvme_path=folder)
            outcome = curve(options.curve, placement=storage, threads=options.threads)
        print({key: outcome[key] for key in ("largest difference", "mean of the last 50")})
    else:
        outcome = compare(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
