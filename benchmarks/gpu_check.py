"""What to run on a machine with an accelerator: the device tests and a short benchmark, within 8 minutes.

    python benchmarks/gpu_check.py        # writes benchmarks/results/gpu_check-<device>.json

Needs torch, pytest and transformers in the python that runs it, and the package built into it (`make gpu-check`).
Without an accelerator the same checks run with the cpu as the device.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import step

FOLDER = Path(__file__).parent
TEST_SECONDS = 240


def device_tests() -> dict[str, Any]:
    """Run tests/gpu; the outcome of each test."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "tests/unit/rules/test_on_device.py",
        "-m",
        "thorough or not thorough",
        "-rA",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    try:
        done = subprocess.run(
            command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, code = f"{(expired.stdout or b'').decode()}\nended after {TEST_SECONDS} s", 124
    print(output)
    outcomes: dict[str, str] = {}
    for line in output.splitlines():
        found = re.match(r"(PASSED|FAILED|SKIPPED|ERROR) (\S+)", line)
        if found:
            outcomes[found[2]] = found[1].lower()
    return {"exit_code": code, "seconds": time.perf_counter() - started, "outcomes": outcomes, "tail": output[-4000:]}


def main() -> int:
    """Run everything, write the report, return the tests' exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=step.MODELS, default="355m")
    arguments = parser.parse_args()
    description = machine.describe()
    report: dict[str, Any] = {"machine": description, "tests": device_tests(), "step": {}}
    for tier in ("cpu", "device"):
        options = ["--model", arguments.model, "--rounds", "7", "--warmup", "2", "--tier", tier]
        options += ["--sequence", "1024", "--batch", "4"] if description["accelerator"] else []
        report["step"][tier] = step.report(step.parse(options))
    name = re.sub(r"\W+", "-", description["accelerator"] or "cpu").strip("-").lower()
    out = arguments.out or FOLDER / "results" / f"gpu_check-{name}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {out}")
    return report["tests"]["exit_code"]


if __name__ == "__main__":
    sys.exit(main())
