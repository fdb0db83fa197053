"""Offloaded training on a GPU: penstock's placements beside the systems that people use, in one command.

    python benchmarks/gpu/run.py                                        # qwen3-0.6b, 16k tokens a step, 5 minutes
    python benchmarks/gpu/run.py --shape llama-3-8b --memory-gb 24,48,80 --budget-seconds 3600
    python benchmarks/gpu/run.py --case twin-flow                       # or streamed, nvme, curves, ...
    python benchmarks/gpu/run.py --shape tiny                           # a quick look, on a cpu too

Nothing is downloaded. Each contender runs in a process of its own, one after the other and with a limit, and is a row
of the report whatever becomes of it, those first that tell most. What is not installed is skipped and named. The report
is replaced whole after each round of steps, so nothing that was found is lost where a run is cut off; `draw.py` makes
plots and tables of reports.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import parts
from judge import judge, losses_in_short
from rows import CASES, LOSS_TOLERANCE, RATES, SCRIPTS, Case, Contender, contenders
from shapes import SHAPES

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
DESCRIBE = "import json, machine; print(json.dumps(machine.describe()))"
PACKAGES = ("penstock", "torch", "transformers", "deepspeed", "torchao")
LEAST_SECONDS = 5.0
Row = dict[str, Any]
Tell = Callable[[list[Row]], None]
#: A folder of packages that only the contenders see that need one: transformers imports some of them where it can.
PEERS = os.environ.get("PENSTOCK_PEERS", "")
if PEERS:
    sys.path.append(PEERS)


def environment(threads: int, peers: str = "") -> dict[str, str]:
    """What every process is started with."""
    path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"), peers)))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def run_limited(
    command: list[str],
    log: Path,
    seconds: float,
    threads: int,
    peers: str = "",
    watch: Callable[[], None] = lambda: None,
) -> str:
    """Run a command and everything that it starts, for so many seconds; what went wrong, or nothing.

    Arguments:
        watch: called again and again while it runs.
    """
    ends = time.monotonic() + seconds
    with parts.ended_with_us(command, log, environment(threads, peers)) as process:
        while (code := process.poll()) is None:
            if time.monotonic() > ends:
                return f"ended after {seconds:.0f} s"
            watch()
            time.sleep(parts.POLL_SECONDS)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    last_line = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    return f"exit status {code}: {last_line[:400]}" if code else ""


def run_one(
    contender: Contender,
    settings: dict[str, Any],
    seconds: float,
    tell: Tell = lambda rows: None,
) -> list[Row]:
    """The outcomes of one contender, of each batch size: status, the reason for it, and figures where measured.

    Arguments:
        tell: called with what there is so far, whenever there is more.
    """
    package = contender.needs.partition(".")[0]
    if find_spec(package) is None or find_spec(contender.needs) is None:
        return outcomes(settings, {}, "skipped", f"{contender.needs} is not there")
    if seconds < LEAST_SECONDS:
        return outcomes(settings, {}, "skipped", "no time was left of --budget-seconds")
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", os.devnull)).glob("**/lock"):
        lock.unlink()  # of a compilation that was ended: torch would wait for it without end
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "rows.json")
        given = settings | {"setup": contender.setup, "options": contender.options, "states": contender.states}
        command = [sys.executable, str(HERE / "measure.py"), json.dumps(given), str(out)]
        peers = PEERS if package != "torch" else ""
        told = 0

        def watch() -> None:
            nonlocal told
            if out.exists() and (changed := out.stat().st_mtime_ns) != told:
                told = changed
                tell(outcomes(settings, json.loads(out.read_text()), "over its limit", "cut off with the whole run"))

        wrong = run_limited(command, Path(scratch, "log"), seconds, settings["threads"], peers, watch)
        found = json.loads(out.read_text()) if out.exists() else {}
        status = "over its limit" if wrong.startswith("ended") else "failed"
        return outcomes(settings, found, found.get("status") or status, found.get("reason") or wrong)


def outcomes(settings: dict[str, Any], found: dict[str, Any], status: str, reason: str) -> list[Row]:
    """A row for each batch size; what went wrong is told of the one that was under way, and of those after it."""
    measured = {row["batch"]: row for row in found.get("rows", ())}
    under_way = found.get("under_way", settings["batches"][0])
    rows = []
    for batch in settings["batches"]:
        row = {"batch": batch, "sequence": settings["sequence"], "status": status, "reason": reason}
        if batch in measured:  # the rounds before count
            cut = f"figures of {len(measured[batch]['round_step_ms'])} rounds; then {reason}"
            row = measured[batch] | {"status": "measured", "reason": cut if batch == under_way else ""}
        rows.append(row)
    return rows


def run_case(case: Case, arguments: argparse.Namespace, tell: Tell = lambda rows: None) -> Iterator[Row]:
    """The rows of a case, one after the other; `tell` is given those of a contender that is under way."""
    ends = time.monotonic() + arguments.limit
    settings = {key: value for key, value in asdict(case).items() if key not in ("contenders", "batch")} | {
        "batches": arguments.batch or [case.batch],
        "recompute": arguments.recompute,
        "chunked_loss": arguments.chunked_loss,
        "threads": arguments.threads,
        "peak_flops": arguments.peak_flops,
    }
    chosen = arguments.contenders.split(",") if arguments.contenders else case.contenders
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        known = contenders(
            batch=settings["batches"][0],
            sequence=case.sequence,
            folder=folder,
            max_grad_norm=1.0 if arguments.clip else None,
        )
        if unknown := set(chosen) - set(known):
            sys.exit(f"--contenders: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
        for memory_gb in arguments.memory_gb:
            for name in chosen:
                seconds = min(arguments.contender_limit, ends - time.monotonic())
                traces = arguments.traces and str(arguments.traces / f"trace-{case.shape}-{name}.json.gz")
                given = settings | {"memory_gb": memory_gb, "trace_out": traces}
                row = {"name": name, "memory_gb": memory_gb, **asdict(known[name])} | dict.fromkeys(RATES)
                found = run_one(known[name], given, seconds, lambda rows, row=row: tell([row | each for each in rows]))
                yield from (row | each for each in found)
                for left in Path(folder).iterdir():  # by a contender that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


def run_script(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A benchmark that compares in one process of its own; its report is in the row."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "report.json")
        command = [sys.executable, str(BENCHMARKS / SCRIPTS[name]), "--model", script_model(arguments)]
        command += ["--folder", arguments.folder]
        command += ["--threads", str(arguments.threads), "--out", str(out)]
        wrong = run_limited(command, Path(scratch, "log"), arguments.limit, arguments.threads)
        report = None if wrong else json.loads(out.read_text())
        return {"name": name, "status": "failed" if wrong else "measured", "reason": wrong, "report": report}


def script_model(arguments: argparse.Namespace) -> str:
    """The model of such a benchmark, which has its own."""
    return "tiny" if arguments.shape == "tiny" else "355m"


def describe(threads: int) -> dict[str, Any]:
    """The machine, asked in a process of its own: this one never takes memory of the device."""
    command = [sys.executable, "-c", DESCRIBE]
    done = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def versions() -> dict[str, str]:
    """Of what is compared, where it is installed."""
    return {name: version(name) for name in PACKAGES if find_spec(name) is not None}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=(*CASES, *SCRIPTS), default="step")
    parser.add_argument("--shape", choices=SHAPES, help="the model; each case has its own")
    parser.add_argument("--contenders", help="comma-separated; each case has its own")
    parser.add_argument(
        "--batch",
        type=lambda text: sorted(int(part) for part in text.split(",")),
        help="sequences of a step; several, such as 4,8,16, are rows of one process that prepares once",
    )
    for name in ("sequence", "warmup", "rounds", "steps"):
        parser.add_argument(f"--{name}", type=int, help="each case has its own")
    parser.add_argument(
        "--memory-gb",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[80.0],
        help="device memory that torch may take, one run for each, such as 24,48,80 (default 80)",
    )
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    parser.add_argument("--chunked-loss", action="store_true", help="of every contender: none makes whole logits")
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=True, help="the gradient's norm at 1")
    parser.add_argument("--peak-flops", type=float, help="bf16 FLOP/s of the device, where the table lacks it")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk of the nvme tier")
    parser.add_argument("--traces", type=Path, help="a folder for a profiler's trace of each contender's step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget-seconds", type=float, dest="limit", default=300.0, help="for everything")
    parser.add_argument("--contender-limit", type=float, default=60.0, help="seconds for one contender")
    parser.add_argument("--out", type=Path, help="a .json file, or a folder for gpu-CASE-SHAPE-DEVICE.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the case and write its report."""
    arguments = parse()
    parts.end_on_signals()
    if find_spec("transformers") is None:
        sys.exit("transformers is not installed: the models are its configurations. Install penstock[train].")
    machine = describe(arguments.threads)
    if machine["accelerator"] is None:
        arguments.memory_gb = [None]  # a cpu as the device has no cap
    report: dict[str, Any] = {
        "case": arguments.case,
        "machine": machine,
        "versions": versions(),
        "settings": {},
        "rows": [],
    }

    def tell(under_way: list[Row]) -> None:
        rows = [*report["rows"], *under_way]
        judge(rows, clipped=arguments.clip)
        parts.write_report(out, report | {"rows": rows})

    if arguments.case in SCRIPTS:
        shape = script_model(arguments)
        rows = iter([run_script(arguments.case, arguments)])
    else:
        given = {key: getattr(arguments, key) for key in ("shape", "sequence", "warmup", "rounds", "steps")}
        case = replace(CASES[arguments.case], **{key: value for key, value in given.items() if value is not None})
        shape = case.shape
        report["settings"] = asdict(case) | ({"batch": arguments.batch} if arguments.batch else {})
        rows = run_case(case, arguments, tell)
    report["settings"]["loss_tolerance"] = LOSS_TOLERANCE
    report["settings"] |= {key: str(value) for key, value in vars(arguments).items() if key not in report["settings"]}
    device = re.sub(r"\W+", "-", machine["accelerator"] or "cpu").strip("-").lower()
    out = arguments.out or BENCHMARKS / "results"
    if out.suffix != ".json":
        out = out / f"gpu-{arguments.case}-{shape}-{device}.json"
    parts.write_report(out, report)
    for row in rows:
        report["rows"].append(row)
        judge(report["rows"], clipped=arguments.clip)
        parts.write_report(out, report)
        print(line_of(row), flush=True)
    print(f"written: {out}")


def line_of(row: dict[str, Any]) -> str:
    """A row in short."""
    cap = f"{row['memory_gb']:g} GB" if row.get("memory_gb") else ""
    work = f"{row['batch']}x{row['sequence']}" if row.get("batch") else ""
    said = [f"{row['name']:<32}{work:>9}{cap:>6}  {row['status']:<15}"]
    if row.get("tokens_per_second"):
        said += [f"{row['tokens_per_second']:,.0f} tokens/s", f"loss {losses_in_short(row)}"]
        said += [f"device {row['device_peak_bytes'] / 1e9:.1f} GB", f"host {row['resident_bytes'] / 1e9:.1f} GB"]
    if row.get("differs"):
        said.append(f"LOSSES DIFFER from {row['losses_beside']} by {row['losses_apart']:.3g}")
    said += [f"{t['target']}: {t['measured']:.2f}, {'met' if t['met'] else 'missed'}" for t in row["targets"]]
    return "  ".join(filter(None, [*said, row["reason"]]))


if __name__ == "__main__":
    main()
