"""The update of one flat tensor on the host: ours, torch's, DeepSpeed's where it is installed, and what memory allows.

    python benchmarks/rules.py --numel 100e6 --threads 1 2 --rounds 7

All contenders of one number of threads work on the same arrays, in turns: a noisy machine disturbs them alike. A
row's bound is a C program that reads and writes the same bytes with hardly any arithmetic (bound.c), timed in the same
round; `of_bound` is the median over the rounds of bound / time, `least_of_bound` the same of the shortest times. Ours
takes a bf16 gradient, unscales and clips it, and writes a bf16 parameter, in one pass; the norm that clipping needs is
measured by itself, and together with the update. The rows share their arrays, 28 bytes per parameter in all.

DeepSpeed's rows need its package, which this project does not depend on. An environment of the same Python and the same
torch can lend it for the run (its kernel is compiled at first use, by the ninja in PATH):

    python3.11 -m venv PEERS && PEERS/bin/pip install torch==2.13.0 deepspeed==0.19.8
    PATH=$PWD/.venv/bin:$PATH PYTHONPATH=PEERS/lib/python3.11/site-packages python benchmarks/rules.py
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass
class Row:
    """One contender: what it runs, and the arrays that it has to read alone and to read and write."""

    run: Callable[[], Any]
    in_place: list[Any]
    read: list[Any]
    seconds: list[float] = field(default_factory=list)
    bound_seconds: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(2 * t.nbytes for t in self.in_place) + sum(t.nbytes for t in self.read)


def compile_bound() -> Any:
    library = Path(tempfile.mkdtemp()) / "bound.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["cc", *flags, str(HERE / "bound.c"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def bound_of(library: Any, row: Row, threads: int) -> Callable[[], Any]:
    def pack(tensors: list[Any]) -> tuple[Any, Any, int]:
        count = len(tensors)
        addresses = (ctypes.c_void_p * max(1, count))(*(t.data_ptr() for t in tensors))
        sizes = (ctypes.c_size_t * max(1, count))(*(t.nbytes for t in tensors))
        return addresses, sizes, count

    arguments = (*pack(row.in_place), *pack(row.read), threads)
    return lambda: library.bound(*arguments)


def contenders(numel: int, threads: int) -> tuple[dict[str, Row], dict[str, str]]:
    """Rows by name, and who was left out with the reason."""
    import torch

    from penstock.rules import Pool, StateFormat, UpdateSlice, rule_for, squared_norm

    torch.manual_seed(0)
    pool = Pool(threads)
    adamw: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
    value = torch.randn(numel)
    param, remainder = value.bfloat16(), torch.zeros(numel, dtype=torch.int16)
    grad = torch.randn(numel).mul_(1e-3).bfloat16()
    # One array for the signed states of a dtype, one for those that must not be negative.
    shared: dict[tuple[torch.dtype, bool], Any] = {}
    rows: dict[str, Row] = {}

    def state_of(dtype: torch.dtype, *, signed: bool) -> Any:
        if (dtype, signed) not in shared:
            shared[dtype, signed] = torch.zeros(numel, dtype=dtype)
        return shared[dtype, signed]

    def ours(name: str, cls: Any, format_: StateFormat, *, master: bool = True, **options: Any) -> Callable[[], None]:
        optimizer = cls([torch.zeros(1)], **options)
        rule = rule_for(optimizer, format_)
        states, scales = [], []
        for spec in rule.states:
            states.append(state_of(spec.dtype, signed=spec.signed))
            scales.append(torch.zeros(numel // 256) if spec.scale_name else None)
        segment = UpdateSlice(param, grad, remainder if master else None, tuple(states), tuple(scales))
        step_scalars = rule.step_scalars(optimizer.param_groups[0], 10)

        def run() -> None:
            rule.update(segment, step_scalars, 0.5, pool)

        extra = [scale for scale in scales if scale is not None]
        rows[name] = Row(run, [param, *([remainder] if master else []), *states, *extra], [grad])
        return run

    update = ours("penstock AdamW", torch.optim.AdamW, StateFormat(), **adamw)
    rows["penstock norm"] = Row(lambda: squared_norm(grad, pool=pool), [], [grad])

    def both() -> None:
        squared_norm(grad, pool=pool)
        update()

    rows["penstock norm + AdamW"] = Row(both, rows["penstock AdamW"].in_place, [grad, grad])
    ours("penstock AdamW, states bf16 nearest", torch.optim.AdamW, StateFormat("bf16", "nearest"), **adamw)
    ours("penstock AdamW, states bf16", torch.optim.AdamW, StateFormat("bf16", "stochastic"), **adamw)
    ours("penstock AdamW, all bf16", torch.optim.AdamW, StateFormat("bf16", "stochastic"), master=False, **adamw)
    ours("penstock AdamW, states int8", torch.optim.AdamW, StateFormat("int8"), **adamw)
    ours("penstock SGD momentum", torch.optim.SGD, StateFormat(), lr=1e-4, momentum=0.9)
    ours("penstock Adagrad", torch.optim.Adagrad, StateFormat(), lr=1e-4)

    moments = [state_of(torch.float32, signed=signed) for signed in (True, False)]
    value_grad = grad.float()
    value.grad = value_grad
    theirs = torch.optim.AdamW([value], fused=True, **adamw)
    theirs.state[value] = {"step": torch.tensor(9.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    rows["torch AdamW fused, fp32"] = Row(theirs.step, [value, *moments], [value_grad])

    left_out = {}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        deepspeed = DeepSpeedCPUAdam([value], **adamw)
        deepspeed.state[value] = {"step": 9, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        rows["DeepSpeedCPUAdam, fp32"] = Row(deepspeed.step, [value, *moments], [value_grad])

        def chain() -> None:
            """What an offloaded bf16 step passes over, one array operation at a time."""
            value_grad.copy_(grad)
            value_grad.norm(2)
            value_grad.mul_(1.0)
            deepspeed.step()
            param.copy_(value)

        rows["DeepSpeed's chain, bf16 to bf16"] = Row(chain, [value, *moments, param], [grad])
    except ImportError as error:
        left_out["DeepSpeedCPUAdam"] = f"not importable here: {error}"
    return rows, left_out


def measure(numel: int, threads: int, rounds: int, library: Any) -> dict[str, Any]:
    gc.collect()  # torch's optimizers are in cycles with the arrays of the run before
    rows, left_out = contenders(numel, threads)
    for turn in range(rounds + 1):
        for row in rows.values():
            for what, seconds in ((row.run, row.seconds), (bound_of(library, row, threads), row.bound_seconds)):
                start = time.perf_counter()
                what()
                elapsed = time.perf_counter() - start
                if turn > 0:
                    seconds.append(elapsed)
    figures: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        median = statistics.median(row.seconds)
        figures[name] = {
            "bytes_per_param": round(row.nbytes / numel, 3),
            "ns_per_param": round(median / numel * 1e9, 4),
            "least_ns_per_param": round(min(row.seconds) / numel * 1e9, 4),
            "gigabytes_per_second": round(row.nbytes / median / 1e9, 2),
            "least_of_bound": round(min(row.bound_seconds) / min(row.seconds), 3),
            "of_bound": round(statistics.median(b / s for b, s in zip(row.bound_seconds, row.seconds, strict=True)), 3),
        }
        print(f"{name:40}", *(f"{key} {value:8.3f}" for key, value in figures[name].items()), flush=True)
        figures[name]["rounds"] = {"seconds": row.seconds, "bound_seconds": row.bound_seconds}
    return {"numel": numel, "threads": threads, "rounds": rounds, "rows": figures, "left_out": left_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, nargs="+", default=[100e6, 500e6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rules.json")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import machine
    import torch

    from penstock import _native

    library = compile_bound()
    load_before = os.getloadavg()[0]
    runs = []
    for size in arguments.numel:
        numel = int(size) // 1024 * 1024
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            print(f"{numel / 1e6:.0f}M parameters, {threads} threads, {_native.isa()}", flush=True)
            runs.append(measure(numel, threads, arguments.rounds, library))
    arguments.out.parent.mkdir(exist_ok=True)
    found = {"machine": machine.describe(), "isa": _native.isa(), "load_before": load_before, "runs": runs}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
