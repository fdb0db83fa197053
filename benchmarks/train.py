"""Tokens a second of `penstock train`, of this checkout beside another, or of one setting beside another.

    python benchmarks/train.py --others path/to/other/.venv/bin/python     # the run without options
    python benchmarks/train.py --set "--packing true" --set "--packing false" -- --model M --data chat.jsonl

Whole runs take turns, each in a process of its own. What counts is the median of the last steps of each, which no
warming up is part of; ratios are of the runs of a round.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

RUN = ["--max_steps", "60", "--logging_steps", "20", "--eval_strategy", "no", "--report_to", "none"]
TOLD = 20  # the last steps, which count
RESULTS = Path(__file__).parent / "results"


def tokens_per_second(python: str, options: list[str]) -> float:
    """Make a run, and return what its last steps say."""
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "penstock", "train", *RUN, *options, "--out", out]
        subprocess.run(command, check=True, capture_output=True, cwd=Path.cwd())
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    told = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(told[-TOLD:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", action="append", default=[], help="the python of another checkout")
    parser.add_argument("--set", action="append", default=[], help="options of one side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="train", help="of the results")
    parser.add_argument("options", nargs="*", help="options of all runs, behind --")
    arguments = parser.parse_args()
    sides = [(sys.executable, shlex.split(options)) for options in arguments.set or [""]]
    sides += [(python, []) for python in arguments.others]
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(arguments.rounds):
        for place, (python, own) in enumerate(sides):
            found[place].append(tokens_per_second(python, [*arguments.options, *own]))
        print(" ".join(f"{values[-1]:10,.0f}" for values in found), flush=True)
    sets = [" ".join(own) or "this checkout" if python == sys.executable else "the other" for python, own in sides]
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[0], values, strict=True))
        for name, values in zip(sets[1:], found[1:], strict=True)
    }
    told = {"machine": machine.describe(), "sides": dict(zip(sets, found, strict=True)), "first over each": ratios}
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
