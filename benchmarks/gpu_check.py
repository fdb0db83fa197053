"""What to run first on a machine with an accelerator: does everything work there, in five minutes.

    python benchmarks/gpu_check.py                    # writes benchmarks/results/gpu_check-<device>.json
    python benchmarks/gpu_check.py --parts movement,rules --item-seconds 120

The parts come in the order in which they tell most, each in processes of its own and within its share of the budget:

    pinning    a slab: registered, how fast beside torch's own pinned memory, what comes back when it is closed
    parity     the same training wherever state rests, on the user's own stream, with every way to move it
    movement   memory by the formula, overlap, no waiting of the host, pageable memory, several devices
    rules      the compiled updates against the host's, the reference on the device bit by bit

The report is written after every row and is whole at every moment: whatever ends this, what was found is there. Needs
torch and pytest in the python that runs it, and the package built into it (`make gpu-check`). Without an accelerator
the same parts run with the cpu as the device.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import parts
from parts import Entry, Part

FOLDER = Path(__file__).resolve().parent
DESCRIBE = "import json, machine; print(json.dumps(machine.describe()))"
DESCRIBE_SECONDS = 60.0
#: What of the budget nobody is given: to start, and to end what is over its budget.
MARGIN = 0.03
BAD = ("failed", "hung", "crashed")
TESTS = {
    "parity": (
        "tests/gpu/test_parity.py",
        "tests/gpu/test_own_stream.py",
        "tests/gpu/test_modes.py",
        "tests/gpu/test_loops.py",
    ),
    "movement": (
        "tests/gpu/test_movement.py",
        "tests/gpu/test_pinned.py",
        "tests/gpu/test_several_devices.py",
        "tests/gpu/test_train.py",
    ),
    "rules": ("tests/unit/rules/test_on_device.py", "tests/gpu/test_rules.py"),  # what compiles nothing first
}
TELLS = {
    "pinning": "whether host memory can be registered, its bandwidth, and whether it comes back",
    "parity": "whether the result is the same wherever state rests",
    "movement": "whether memory, overlap and waiting are what the design says",
    "rules": "whether the device's updates are the host's",
}
SHARES = {"pinning": 0.15, "parity": 0.35, "movement": 0.25, "rules": 0.25}


def pytest_command(files: Sequence[str], *, options: Sequence[str]) -> list[str]:
    """The tests of a part, each reported as soon as it is over."""
    plain = ["-o", "addopts=", "--strict-markers", "--import-mode=importlib", "--continue-on-collection-errors"]
    plain += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "pytest_journal"]
    return [sys.executable, "-m", "pytest", *files, *plain, *options]


def make_parts(names: Sequence[str], *, options: Sequence[str]) -> list[Part]:
    """The parts, in the order in which they tell most."""
    script = [sys.executable, "-X", "faulthandler", str(FOLDER / "gpu" / "pinning.py")]
    found = [Part("pinning", TELLS["pinning"], script, SHARES["pinning"])]
    for name, files in TESTS.items():
        command = pytest_command(files, options=options)
        ended = (0, 1, 5)  # of pytest: all passed, some failed, none was left
        found.append(Part(name, TELLS[name], command, SHARES[name], ended, FOLDER.parent))
    return [part for part in found if part.name in names]


def environment() -> dict[str, str]:
    """What every process is started with."""
    path = os.pathsep.join(filter(None, (str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def describe() -> dict[str, Any]:
    """The machine, asked in a process of its own: this one never takes memory of the device, nor waits for it."""
    command = [sys.executable, "-c", DESCRIBE]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=True, timeout=DESCRIBE_SECONDS
        )
    except subprocess.CalledProcessError as error:
        return {"accelerator": None, "error": error.stderr[-parts.LOG_CHARACTERS :]}
    except subprocess.TimeoutExpired:
        return {"accelerator": None, "error": f"torch did not say what there is within {DESCRIBE_SECONDS:g} s"}
    return json.loads(done.stdout.splitlines()[-1])


class Report:
    """The report as it grows: written after each row, each row printed once.

    Arguments:
        out: a file, or a folder for a file that is named like the device.
    """

    def __init__(self, out: Path | None, settings: dict[str, Any]) -> None:
        found = describe()
        self._started = time.monotonic()
        self.content: dict[str, Any] = {"machine": found, "settings": settings, "seconds": 0.0, "parts": []}
        name = re.sub(r"\W+", "-", found["accelerator"] or "cpu").strip("-").lower()
        out = out or FOLDER / "results"
        self.path = out if out.suffix == ".json" else out / f"gpu_check-{name}.json"
        self._printed: dict[str, int] = {}
        self.write()

    def changed(self, entries: list[Entry]) -> None:
        """A part has begun or ended, or a row has come."""
        self.content["parts"] = [asdict(entry) for entry in entries]
        self.write()
        for entry in entries:
            for row in entry.rows[self._printed.get(entry.name, 0) :]:
                print(f"{entry.name:<9} {row['seconds']:7.1f} s  {row['status']:<8} {row['name']}", flush=True)
                if row["status"] in BAD:
                    print(f"{row['reason'][-1200:]}\n", flush=True)
            self._printed[entry.name] = len(entry.rows)

    def write(self) -> None:
        """Write what there is."""
        self.content["seconds"] = round(time.monotonic() - self._started, 1)
        parts.write_report(self.path, self.content)


def summary(entries: Sequence[Entry]) -> str:
    """A line for each part, and the names of what went wrong."""
    lines = []
    for entry in entries:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(entry.counts.items()))
        lines.append(f"{entry.name:<9} {entry.status:<16} {entry.seconds:6.1f} s  {counts or entry.reason[-300:]}")
        lines += [f"    {row['status']}: {row['name']}" for row in entry.rows if row["status"] in BAD]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a .json file, or a folder; default: benchmarks/results")
    parser.add_argument("--budget-seconds", type=float, default=300.0, help="for everything")
    parser.add_argument("--item-seconds", type=float, default=60.0, help="without a word, until an item counts as hung")
    parser.add_argument("--parts", default=",".join(TELLS), help="comma-separated; default: all, in this order")
    parser.add_argument("--pytest", action="append", default=[], help="a further argument of pytest, such as -x")
    found = parser.parse_args(arguments)
    if unknown := set(found.parts.split(",")) - set(TELLS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(TELLS)}")
    return found


def main() -> int:
    """Run the parts; 0 where all of them came to their end and nothing is wrong."""
    arguments = parse()
    parts.end_on_signals()
    started = time.monotonic()
    settings = {key: str(value) for key, value in vars(arguments).items()}
    report = Report(arguments.out, settings)
    print(f"{report.content['machine']}\nreport: {report.path}", flush=True)
    entries = parts.run_parts(
        make_parts(arguments.parts.split(","), options=arguments.pytest),
        seconds=arguments.budget_seconds * (1 - MARGIN) - (time.monotonic() - started),
        item_seconds=arguments.item_seconds,
        environment=environment(),
        changed=report.changed,
    )
    report.changed(entries)
    print(f"\n{summary(entries)}\nwritten: {report.path}")
    wrong = any(row["status"] in BAD for entry in entries for row in entry.rows)
    return int(wrong or any(entry.status != "done" for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
