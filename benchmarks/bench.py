"""Everything side by side, with one command: plain torch, FSDP2, DeepSpeed where it is lent, the disk, and Penstock.

    python benchmarks/bench.py                    # 18 minutes of a quiet machine; `make bench`
    python benchmarks/bench.py --quick            # three minutes; `make bench QUICK=1`
    python benchmarks/bench.py --only small,start
    python benchmarks/bench.py --list

Each part is a benchmark of this folder, whose contenders take turns. The run becomes one file with the machine and its
load, a drawing, and a word for each figure beside the stored run of the same kind: better, equal within the noise, or
worse. `--store` makes it the stored one. A part that fails is left out, with the reason, and the others go on.

DeepSpeed is not a dependency: `--peers` names the interpreter of an environment that has it, made with the same Python
and without another torch; its packages are seen beside this one's.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import bench_compare
import machine
from bench_draw import draw
from bench_figures import FORM, Figure, as_json, figures_of, median, missing, read_report
from bench_parts import PARTS, Part

HERE = Path(__file__).parent
LIMIT_SECONDS = {True: 240.0, False: 3600.0}  # of one part, quick and full
LIBRARIES = ("torch", "transformers", "safetensors", "penstock")


def packages_of(interpreter: str) -> str:
    """The folder of an environment's packages.

    Raises:
        SystemExit: there is no such interpreter, or it has another version of Python.
    """
    code = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('purelib'), sep='|')"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"--peers {interpreter}: not an interpreter that runs ({type(error).__name__}).") from error
    version, _, folder = done.stdout.strip().partition("|")
    if version != str(sys.version_info[:2]):
        raise SystemExit(f"--peers {interpreter}: Python {version}, not {sys.version_info[:2]}: make it with this one.")
    return folder


def run_script(line: Sequence[str], log: Path, environment: dict[str, str], seconds: float) -> str:
    """Run a benchmark, with what it prints in a file; returns why it failed, or nothing."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *line],
            cwd=HERE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except BaseException as error:  # its contenders are processes, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"not done after {seconds:.0f} s"
            raise
    if code == 0:
        return ""
    said = log.read_text().strip().splitlines()
    return f"ended with {code}: {said[-1] if said else 'it said nothing'}"


def run_part(
    name: str, part: Part, options: argparse.Namespace, environment: dict[str, str]
) -> tuple[list[Figure], dict[str, str]]:
    """One part: its figures, and who is left out with the reason."""
    if reason := part.lacks():
        return [], {name: reason}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="penstock-bench-") as scratch:
        out, log = Path(scratch, "report.json"), options.out / f"{name}.log"
        given = {"folder": scratch, "threads": str(options.threads)}
        line = part.arguments(quick=options.quick, peers=bool(options.peers), given=given)
        reason = run_script([*line, "--out", str(out)], log, environment, LIMIT_SECONDS[options.quick])
        if reason:
            return [], {name: reason}
        report = json.loads(out.read_text())
    left_out = {f"{name}: {who}": f"see {log.name}" for who in missing(report, part.asked(peers=bool(options.peers)))}
    for who in () if options.peers else part.peers:
        left_out[f"{name}: {who}"] = "no environment has lent it (--peers)"
    return part.read(name, report), left_out


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts, one after the other."""
    environment = dict(os.environ)
    if options.peers:
        paths = [packages_of(options.peers), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    figures: list[Figure] = []
    left_out: dict[str, str] = {}
    seconds: dict[str, float] = {}
    load: dict[str, dict[str, float]] = {}
    for name in options.only:
        started, before = time.perf_counter(), os.getloadavg()[0]
        found, without = run_part(name, PARTS[name], options, environment)
        seconds[name] = round(time.perf_counter() - started, 1)
        load[name] = {"before": before, "after": os.getloadavg()[0]}
        figures += found
        left_out |= without
        print(f"{name}: {len(found)} figures in {seconds[name]:.0f} s", flush=True)
    return {
        "form": FORM,
        "date": datetime.date.today().isoformat(),
        "quick": options.quick,
        "machine": machine.describe(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "settings": {name: settings_of(PARTS[name], options) for name in options.only},
        "load": load,
        "seconds": seconds,
        "figures": as_json(figures),
        "left_out": left_out,
    }


def settings_of(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """What a part's figures depend on, beside the machine."""
    arguments = list(part.quick if options.quick else part.full)
    return {"arguments": arguments, "threads": options.threads if "threads" in part.takes else None}


def table(found: dict[str, Any]) -> str:
    """A run as Markdown."""
    lines = ["| part | contender | median | beside | ratio |", "| --- | --- | --- | --- | --- |"]
    for figure in figures_of(found):
        ratio = "" if figure.ratios is None else f"{median(figure.ratios):.2f}"
        number = f"{median(figure.rounds):.3g} {figure.unit}"
        lines.append(f"| {figure.part} | {figure.name} | {number} | {figure.base} | {ratio} |")
    lines += [f"\nLeft out: {name} ({reason})." for name, reason in found["left_out"].items()]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: for a look, not for docs")
    parser.add_argument("--list", action="store_true", help="print the parts, and end")
    parser.add_argument("--only", type=_names, default=list(PARTS), help="comma-separated parts")
    parser.add_argument("--peers", default=os.environ.get("PEERS", ""), help="the interpreter whose packages join in")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "bench", help="a folder of what is written")
    parser.add_argument("--store", action="store_true", help="make this the run that others are compared with")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def listed() -> str:
    """The parts, a line each."""
    lines = []
    for name, part in PARTS.items():
        names = ", ".join((*part.contenders, *(f"{peer} (--peers)" for peer in part.peers)))
        lines.append(f"{name:<12}{part.script:<15}{part.what}" + (f" [{names}]" if names else ""))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run, write, and compare."""
    options = parse(arguments)
    if options.list:
        print(listed())
        return
    kind = "bench-quick" if options.quick else "bench"
    stored = HERE / "results" / f"{kind}.json"
    then = read_report(stored) if stored.exists() else None
    options.out.mkdir(parents=True, exist_ok=True)
    found = report(options)
    text = json.dumps(found, indent=1) + "\n"
    (options.out / f"{kind}.json").write_text(text)
    (options.out / f"{kind}.svg").write_text(draw(figures_of(found)))
    print(table(found))
    if then is None:
        print(f"There is no stored run to compare with ({stored.name}): --store makes this one it.")
    else:
        comparisons = bench_compare.compare(found, then)
        print(*comparisons, bench_compare.summary(comparisons), sep="\n")
    if options.store:
        stored.write_text(text)
        print(f"stored as {stored.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
