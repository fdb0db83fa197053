"""What a start takes before anything is trained: imports and the command line, each in a new process, in turns.

    python benchmarks/start.py

`import penstock.prepare` is counted over `import torch`: the process imports torch, and the clock starts then. `--help`
is the whole process, beside one of Python alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
from turns import medians

#: Of a new process: what is run, and whether it prints the seconds itself.
CLOCK = "import sys, time; started = time.perf_counter(); {}; print(time.perf_counter() - started)"
COMMANDS: dict[str, tuple[list[str], bool]] = {
    "python": (["-c", "pass"], False),
    "penstock --help": (["-m", "penstock", "--help"], False),
    "import penstock": (["-c", CLOCK.format("import penstock")], True),
    "import torch": (["-c", CLOCK.format("import torch")], True),
    "import penstock.prepare over torch": (
        ["-c", "import torch; " + CLOCK.format("import penstock; penstock.prepare")],
        True,
    ),
}


def seconds_of(name: str) -> float:
    """Run one of the commands."""
    command, says = COMMANDS[name]
    # As of an installed package: the first turn leaves the bytecode that the others find.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    return float(done.stdout) if says else time.perf_counter() - started


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take turns. The first one fills the page cache."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    for turn in range(arguments.rounds + 1):
        for name, figures in rounds.items():
            seconds = seconds_of(name)
            if turn:
                figures.append({"seconds": seconds})
    found = {name: medians(figures) for name, figures in rounds.items()}
    for name, row in found.items():
        print(f"{name:<36}{row['seconds']:>8.3f} s", flush=True)
    return {
        "machine": machine.describe(),
        "settings": {"rounds": arguments.rounds},
        "medians": found,
        "rounds": rounds,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    outcome = report(options)
    if options.out:
        options.out.write_text(json.dumps(outcome, indent=1) + "\n")
