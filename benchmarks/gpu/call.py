"""What to run in the few minutes that a GPU is lent for, what tells most first: two calls, on a Python with torch.

    bash benchmarks/gpu/make-wheels.sh                      # before, at home: what that Python lacks
    python3 benchmarks/gpu/call.py first --seconds 300      # is it right? how long is a steady step?
    python3 benchmarks/gpu/call.py second --seconds 480     # streamed updates, auto, 8B, other systems

Neither make nor a network is needed. `--out` (or `$OUT`) gets a report for each step, which is replaced whole after
each of its rows, and `call.json`, which says how each step ended: a call may be cut off at any time. Put the reports
into a folder of `benchmarks/results/gpu`. What passed, or was measured, on the same sources is not run again, so that a
call that was cut off goes on where it ended.

Steps of a group run beside each other; none whose time counts does.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import parts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
WHEELS = ROOT / "build" / "gpu-wheels"
BAD = ("failed", "hung", "crashed", "over its budget")
LEAST_SECONDS = 8.0
LAST_LINES, LINE_CHARACTERS = 12, 240
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a process that has CUDA forks no compilers
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
KERNEL = (
    "import os, sys, torch; sys.path.append(os.environ.get('PENSTOCK_PEERS', ''));"
    "from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam; Adam([torch.nn.Parameter(torch.zeros(8))])"
)
#: Into a file of the call, and to where `auto` looks: it would measure again.
PROBE = (
    "import sys; from penstock.planner import this_machine as here; machine = here.probe(seconds=float(sys.argv[1]));"
    "here.remember(machine); machine.write(sys.argv[2])"
)
FACTS = (
    "nvidia-smi; nvidia-smi --format=csv --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max,"
    "power.limit,clocks.sm,clocks.mem; lscpu; free -g; ulimit -l; df -hT . /tmp /dev/shm; nproc; uname -a;"
    "cat /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max"
)
Report = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One question, and the command that answers it.

    Attributes:
        name: of its report.
        asks: the question; empty where a step answers none.
        seconds: how long it may take.
    """

    name: str
    asks: str
    seconds: float

    def missing(self, reports: Sequence[Report]) -> list[str]:
        """Name what no report answers."""
        raise NotImplementedError

    def command(self, out: Path, seconds: float, earlier: Sequence[Report], tiny: bool) -> list[str]:
        """Return what is run within so many seconds; nothing of what reports of the same sources have."""
        raise NotImplementedError


@dataclass(frozen=True)
class Check(Step):
    """Tests, by `gpu_check.py`.

    Attributes:
        part: one of its parts.
        only: words in the names of the tests, where not the whole part is asked for.
        but: words in the names of those that are left out.
    """

    part: str = ""
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def rows(self, report: Report) -> list[dict[str, Any]]:
        return [row for part in report.get("parts", ()) if part["name"] == self.part for row in part["rows"]]

    def missing(self, reports: Sequence[Report]) -> list[str]:
        if self.only:
            return [word for word in self.only if not any(self._passed(word, report) for report in reports)]
        done = any(
            part["name"] == self.part and part["status"] == "done" and self._all_passed(part["rows"])
            for report in reports
            for part in report.get("parts", ())
        )
        return [] if done else [self.part]

    def _all_passed(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Of those that are asked for: a report of the others alone has none."""
        asked = {row["status"] for row in rows if not any(word in row["name"] for word in self.but)}
        return bool(asked) and not asked & set(BAD)

    def _passed(self, word: str, report: Report) -> bool:
        found = {row["status"] for row in self.rows(report) if word in row["name"]}
        return "passed" in found and not found & set(BAD)

    def command(self, out: Path, seconds: float, earlier: Sequence[Report], tiny: bool) -> list[str]:
        found = [sys.executable, "benchmarks/gpu_check.py", "--out", str(out), "--parts", self.part]
        found += ["--budget-seconds", f"{seconds:.0f}", "--item-seconds", "90"]
        if self.only or self.but:
            words = " or ".join(self.only or self.but)
            found += ["--pytest=-k", f"--pytest={words if self.only else f'not ({words})'}"]
        passed = {row["name"] for report in earlier for row in self.rows(report) if row["status"] == "passed"}
        return found + [f"--pytest=--deselect={name}" for name in sorted(passed) if "::" in name]


@dataclass(frozen=True)
class Bench(Step):
    """Rows of `run.py`: contenders on the same work.

    Attributes:
        batches: sequences of a step, a row for each.
        limit: seconds for one contender.
        options: further ones of `run.py`.
    """

    shape: str = ""
    contenders: tuple[str, ...] = ()
    batches: tuple[int, ...] = (4,)
    sequence: int = 4096
    limit: float = 50.0
    options: tuple[str, ...] = ("--warmup", "2", "--rounds", "2", "--steps", "4")

    def _has(self, name: str, batch: int, report: Report) -> bool:
        settings = report.get("settings", {})
        return settings.get("shape") == self.shape and any(
            row["name"] == name
            and row["status"] == "measured"
            and (row.get("batch") or settings["batch"]) == batch
            and (row.get("sequence") or settings["sequence"]) == self.sequence
            and row.get("steady_step_ms") is not None
            for row in report["rows"]
        )

    def missing(self, reports: Sequence[Report]) -> list[str]:
        found = []
        for name in self.contenders:
            lacks = [str(n) for n in self.batches if not any(self._has(name, n, report) for report in reports)]
            if lacks:
                found.append(name if len(self.batches) == 1 else f"{name} x{','.join(lacks)}")
        return found

    def command(self, out: Path, seconds: float, earlier: Sequence[Report], tiny: bool) -> list[str]:
        names = [missing.partition(" x")[0] for missing in self.missing(earlier)]
        shape, sequence = ("tiny", 32) if tiny else (self.shape, self.sequence)
        found = [sys.executable, "benchmarks/gpu/run.py", "--out", str(out), "--traces", str(out.parent)]
        found += ["--shape", shape, "--batch", ",".join(map(str, self.batches)), "--sequence", str(sequence)]
        found += ["--budget-seconds", f"{seconds:.0f}", "--contender-limit", f"{self.limit:.0f}"]
        return [*found, "--contenders", ",".join(names), *self.options]


@dataclass(frozen=True)
class Probe(Step):
    """The figures of the machine, for plans of the same call's rows."""

    def missing(self, reports: Sequence[Report]) -> list[str]:
        cut = ("1 run, then the time was up", "no time to")  # nothing that a plan can rest on
        machines = [report["figures"].values() for report in reports if "figures" in report]
        whole = (not any(word in figure["how"] for figure in figures for word in cut) for figures in machines)
        return [] if any(whole) else ["the probe"]

    def command(self, out: Path, seconds: float, earlier: Sequence[Report], tiny: bool) -> list[str]:
        target = seconds / 2  # it takes longer where each figure's least runs do; cut off, it would leave nothing
        return [sys.executable, "-c", PROBE, f"{target:.0f}", str(out)]


@dataclass(frozen=True)
class Kernel(Step):
    """DeepSpeed's update, which it compiles at its first use."""

    def missing(self, reports: Sequence[Report]) -> list[str]:
        return [self.name]

    def command(self, out: Path, seconds: float, earlier: Sequence[Report], tiny: bool) -> list[str]:
        return [sys.executable, "-c", KERNEL]


CUT_OFF = ("two_ranks", "test_train")
#: A size, the memory of the device in GB that leaves a choice, and seconds for a contender.
AUTO = (("qwen3-1.7b", "16", 50), ("llama-3-8b", "60", 110), ("qwen3-0.6b", "6", 50))
EIGHT = dict(shape="llama-3-8b", options=("--chunked-loss", "--warmup", "1", "--rounds", "1", "--steps", "4"))
KERNEL_STEP = Kernel("deepspeed-kernel", "", 100)
CALLS: dict[str, tuple[tuple[Step, ...], ...]] = {
    "first": (
        (
            Check(
                "cut-off",
                "Do ranks that share a device end, and does `penstock train` learn?",
                100,
                "movement",
                CUT_OFF,
            ),
            Check("parity", "Is training the same, bit by bit, wherever state rests?", 100, "parity"),
            Check("rules", "Are the device's updates the host's?", 100, "rules"),
            KERNEL_STEP,
        ),
        (Probe("machine", "What does the machine do in a second?", 45),),
        (
            Bench(
                "steady",
                "How long is a steady step of 1.7B, beside plain torch?",
                125,
                shape="qwen3-1.7b",
                contenders=("plain", "penstock-all-cpu", "penstock-optimizer-cpu"),
            ),
        ),
        (Check("pinning", "Is host memory registered, fast, and given back?", 25, "pinning"),),
        (Check("movement", "Are memory, overlap and waits what the design says?", 90, "movement", but=CUT_OFF),),
    ),
    "second": (
        (Probe("machine", "", 45),),
        (
            Bench(
                "streamed",
                "What does a device that does a share of the host's updates reach at 1.7B?",
                100,
                shape="qwen3-1.7b",
                contenders=("penstock-all-cpu-streamed", "penstock-optimizer-cpu-streamed"),
                options=("--warmup", "6", "--rounds", "1", "--steps", "6"),  # the share is measured in five of them
            ),
        ),
        *(
            (
                Bench(
                    f"auto-{shape}",
                    f"Is `auto` 1.1 times as fast as the placement page's first row that fits, {shape} in {memory} GB?",
                    2 * limit,
                    shape=shape,
                    contenders=("penstock-first-fit", "penstock-auto"),
                    limit=limit,
                    options=("--chunked-loss", "--warmup", "2", "--rounds", "1", "--steps", "4", "--memory-gb", memory),
                ),
            )
            for shape, memory, limit in AUTO
        ),
        (
            Bench(
                "8b",
                "8B, everything exact, at 16k, 32k and 64k tokens a step?",
                170,
                contenders=("penstock-optimizer-only-cpu",),
                batches=(4, 8, 16),
                limit=170,
                **EIGHT,
            ),
            KERNEL_STEP,
        ),
        (
            Bench(
                "1.7b",
                "What do other placements, and systems that were not measured, reach at 1.7B?",
                280,
                shape="qwen3-1.7b",
                contenders=(
                    "penstock-device",
                    "deepspeed-superoffload",
                    "deepspeed-zero-offload",
                    "torchao-offload",
                    "penstock-all-cpu-14-threads",
                    "penstock-twin-flow-0.5",
                    "penstock-optimizer-nvme",
                ),
            ),
        ),
        (
            Bench(
                "8b-int8",
                "8B with everything on the host, states in 8 bits?",
                110,
                contenders=("penstock-all-cpu-int8",),
                batches=(4, 8, 16),
                limit=110,
                **EIGHT,
            ),
        ),
        (
            Bench(
                "128k",
                "A context of 128k, activations on the host, and on the device?",
                150,
                shape="qwen3-1.7b",
                contenders=("penstock-all-cpu-activations", "penstock-all-cpu"),
                batches=(1,),
                sequence=131072,
                limit=100,
                options=("--chunked-loss", "--warmup", "1", "--rounds", "1", "--steps", "1"),
            ),
        ),
        (
            Bench(
                "1.7b-again",
                "A steady step of the systems that were measured before?",
                110,
                shape="qwen3-1.7b",
                contenders=("deepspeed-zero3-offload", "fsdp2-offload"),
                limit=60,
            ),
        ),
        (
            Bench(
                "8b-least",
                "8B: the least that a step takes, and a quarter of the state on the device?",
                120,
                contenders=("forward-backward", "penstock-twin-flow-0.75"),
                limit=80,
                **EIGHT,
            ),
        ),
        (
            Bench(
                "0.6b",
                "The same at 0.6B?",
                400,
                shape="qwen3-0.6b",
                contenders=(
                    "plain",
                    "penstock-all-cpu",
                    "penstock-optimizer-cpu",
                    "penstock-device",
                    "penstock-all-cpu-streamed",
                    "penstock-twin-flow-0.5",
                    "penstock-optimizer-nvme",
                    "deepspeed-superoffload",
                    "deepspeed-zero-offload",
                    "deepspeed-zero3-offload",
                    "fsdp2-offload",
                    "torchao-offload",
                ),
            ),
        ),
    ),
}


def read_reports(folders: Iterable[Path]) -> Iterator[Report]:
    """The reports of some folders; files that are none are left out."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(ValueError, OSError):
                found = json.loads(path.read_text())
                if isinstance(found, dict):
                    yield found


@dataclass
class Call:
    """A call under way: its steps and how they ended, in `call.json`."""

    out: Path
    ends: float
    earlier: list[Report]
    tiny: bool
    environment: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, group: Sequence[Step]) -> None:
        """Run the steps of a group beside each other, each as long as it may."""
        with contextlib.ExitStack() as stack:
            under_way = [found for step in group if (found := self._start(step, stack))]
            while under_way:
                under_way = [each for each in under_way if not self._ended(*each)]
                time.sleep(parts.POLL_SECONDS)

    def _start(self, step: Step, stack: contextlib.ExitStack) -> tuple[Any, ...] | None:
        row = {"name": step.name, "asks": step.asks, "status": "running", "seconds": 0.0, "reason": ""}
        self.rows.append(row)
        seconds = min(step.seconds, self.ends - time.monotonic())
        if not step.missing(self.earlier):
            row |= {"status": "skipped", "reason": "reports of the same sources have it"}
        elif seconds < LEAST_SECONDS:
            row |= {"status": "skipped", "reason": "no time was left"}
        self._write()
        say(f"{step.name}: {row['status']}, {seconds:.0f} s {row['reason']}")
        if row["status"] == "skipped":
            return None
        command = step.command(self.out / f"{step.name}.json", seconds - 3, self.earlier, self.tiny)
        log = self.out / f"{step.name}.log"
        process = stack.enter_context(parts.ended_with_us(command, log, self.environment, ROOT))
        started = time.monotonic()
        return process, row, log, started, started + seconds

    def _ended(self, process: "subprocess.Popen[bytes]", row: Report, log: Path, started: float, ends: float) -> bool:
        code = process.poll()
        if code is None and time.monotonic() < ends:
            return False
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = "cut off" if code is None else "done" if code == 0 else f"exit status {code}"
        row |= {"status": status, "seconds": round(time.monotonic() - started, 1)}
        self._write()
        say(f"{row['name']}: {status} after {row['seconds']:.0f} s")
        for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]:
            print("   ", line[:LINE_CHARACTERS], flush=True)
        return True

    def _write(self) -> None:
        parts.write_report(self.out / "call.json", {"steps": self.rows})


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def install(wheels: Path, site: Path) -> dict[str, str]:
    """Install the wheels into folders of their own, those of other systems apart; the environment that names them.

    Raises:
        SystemExit: penstock's wheel is of other sources than this checkout.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if not list(wheels.glob("*.whl")):
        say(f"no wheels in {wheels}: this Python as it is")
        return environment
    stamp, wanted = site / "installed", parts.hash_of(wheels, wheels.rglob("*.whl"))
    if not stamp.exists() or stamp.read_text() != wanted:  # new files would have DeepSpeed's kernel compiled again
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        for source, target in ((wheels, site), (wheels / "peers", site / "peers")):
            if found := list(source.glob("*.whl")):
                subprocess.run([*pip, "--no-cache-dir", "--target", str(target), *map(str, found)], check=True)
        stamp.write_text(wanted)
    installed, here = (parts.hash_of(root, root.rglob("*.py")) for root in (site / "penstock", ROOT / "src/penstock"))
    if installed != here:
        sys.exit(f"The wheel of penstock in {wheels} is of other sources. Run benchmarks/gpu/make-wheels.sh again.")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment |= {"PENSTOCK_PEERS": str(site / "peers"), "TORCH_EXTENSIONS_DIR": str(site / "extensions")}
    return environment


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--seconds", type=float, required=True, help="for everything, installation too")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "build/gpu"), help="default: $OUT")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="what make-wheels.sh made; may be empty")
    parser.add_argument("--site", type=Path, default="/tmp/penstock-site", help="where the wheels are installed")
    parser.add_argument("--earlier", type=Path, default=RESULTS, help="folders of reports from before")
    parser.add_argument("--tiny", action="store_true", help="a model of nothing: to try the call itself")
    return parser.parse_args(arguments)


def main() -> None:
    """Run a call."""
    arguments = parse()
    started = time.monotonic()
    parts.end_on_signals()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "facts.txt").open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(["sh", "-c", FACTS], stdout=file, stderr=subprocess.STDOUT, timeout=30, check=False)
    environment = install(arguments.wheels, arguments.site)
    source = parts.source()
    earlier = read_reports(arguments.earlier.glob("*/"))
    same = [report for report in earlier if report.get("machine", {}).get("source") == source]
    call = Call(out, started + arguments.seconds, same, arguments.tiny, environment)
    for group in CALLS[arguments.call]:
        call.run(group)
    say(f"{time.monotonic() - started:.0f} of {arguments.seconds:.0f} s; reports in {out}")


if __name__ == "__main__":
    main()
