"""Does the suite notice? Twelve faults, each put into a copy of the sources, and the tests that have to fail with it.

    python -m tests.mutate                  all of them, in minutes; exit status 1 if the tests pass with one
    python -m tests.mutate rounding marker  some of them

A fault is a piece of source text that stands there once, and what it becomes. Each copy of `src` lies in
`build/mutated`; the package that is installed is set aside in every process below, ranks and programs too. The same
tests run first on a copy without a fault, in which they have to pass.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build/mutated"
# Imported by every Python process after the files that site-packages brings, among them the finder of the installation.
ASIDE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__module__ != "_editable_skbc_penstock"]
sys.path.insert(0, {source!r})
"""


@dataclass(frozen=True)
class Fault:
    """What is done to the sources.

    Attributes:
        promise: what it breaks, by its number in `docs/design.md#promises-and-their-tests`.
        file: below `src/penstock`.
        old: a piece of its text that stands there once.
        new: what it becomes.
        tests: files or tests that have to fail; those that take the shortest.
    """

    promise: int
    file: str
    old: str
    new: str
    tests: Sequence[str]


FAULTS = {
    "a wait is dropped": Fault(
        6,
        "engine/forward_backward/gather.py",
        "unit.event.wait()  # site gather.over",
        "pass  # site gather.over",
        ["tests/property/test_sequences.py::test_one_trajectory"],
    ),
    "a tile is skipped": Fault(
        1,
        "engine/step/update.py",
        "        if updates:\n            update_slices",
        "        if updates and tile.number != 1:\n            update_slices",
        ["tests/parity/test_streamed.py::test_stretches_of_tiles_change_no_bit"],
    ),
    "the scale of the mean is lost": Fault(
        1,
        "engine/step/context.py",
        "return self._mean * self.clip / self.loss_scale",
        "return self.clip / self.loss_scale",
        ["tests/parity/test_table.py::test_steps_of_two_ranks_are_plain_torchs"],
    ),
    "an earlier micro-batch is lost": Fault(
        1,
        "engine/gradients/reduce.py",
        "parts, adds, stale, known, label)",
        "parts, False, stale, known, label)",
        ["tests/parity/test_table.py::test_steps_are_plain_torchs"],
    ),
    "a rank has another's shard": Fault(
        1,
        "engine/unit/unit.py",
        "self.own_range = layout.shard_range(rank)",
        "self.own_range = layout.shard_range((rank + 1) % layout.shards)",
        ["tests/parity/test_table.py::test_steps_of_two_ranks_are_plain_torchs"],
    ),
    "rounding depends on the tile": Fault(
        1,
        "engine/step/update.py",
        "                first=run.base + run.start,\n                shape=shape,",
        "                first=0,\n                shape=shape,",
        ["tests/parity/test_plain.py::test_low_precision_stays_near_fp32_and_the_world_size_changes_no_random_bit"],
    ),
    "an overflow is not noticed": Fault(
        22,
        "engine/policy.py",
        "if not math.isfinite(measure.grad_norm):",
        "if math.isinf(measure.grad_norm):",
        ["tests/unit/engine/test_skips.py"],
    ),
    "a checksum is ignored": Fault(
        15,
        "checkpoint/tiles.py",
        "file.read(record.offset, part, checksum=record.checksum)",
        "file.read(record.offset, part)",
        ["tests/unit/checkpoint", "tests/property/test_checkpoint_files.py"],
    ),
    "the marker is written first": Fault(
        15,
        "checkpoint/save.py",
        "                    written = self._write(closing, undo)\n",
        "                    if self.manifest is not None:\n"
        "                        commit(self.folder, self.manifest)\n"
        "                    written = self._write(closing, undo)\n",
        ["tests/faults/test_checkpoint_crash.py"],
    ),
    "a rank keeps its error to itself": Fault(
        21,
        "runtime/control_group.py",
        "        # First tell the others, then raise: they wait here for this rank's word.\n",
        "        if failure is not None:\n            raise failure\n",
        ["tests/distributed/test_agreement.py"],
    ),
    "a collective is not counted": Fault(
        7,
        "runtime/collectives.py",
        "        self[name] += 1\n",
        "        self[name] += name != 'all_reduce'\n",
        ["tests/distributed/test_counts.py"],
    ),
    "memory is read too early": Fault(
        6,
        "engine/step/update.py",
        "storage.note_write(all_of([storage.memory.written, written]) if goes_on else written)",
        "pass",
        ["tests/device/test_streams.py"],
    ),
}


def copy_of_sources(name: str, fault: Fault | None) -> Path:
    """Copy `src` with a fault in it; return the folder, to which `PYTHONPATH` is set."""
    folder = OUT / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for library in Path(sys.prefix).glob("lib/python*/site-packages/penstock/_native*.so"):
        shutil.copy(library, folder / "src/penstock")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(ASIDE.format(source=str(folder / "src"))))
    if fault is not None:
        file = folder / "src/penstock" / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            raise SystemExit(f"{fault.file} has {text.count(fault.old)} places for '{name}': write the fault anew.")
        file.write_text(text.replace(fault.old, fault.new))
    return folder


def run(folder: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Run tests on the sources of a folder, up to the first that fails.

    Returns:
        Whether all have passed; and the test that failed, or the end of what pytest said.
    """
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    return ended.returncode == 0, failed[0][:120] if failed else (ended.stdout + ended.stderr)[-400:]


def main(chosen: Sequence[str]) -> int:
    """Apply the faults whose names have one of the words; all without any."""
    faults = {name: fault for name, fault in FAULTS.items() if not chosen or any(word in name for word in chosen)}
    passed, said = run(copy_of_sources("none", None), sorted({test for one in faults.values() for test in one.tests}))
    if not passed:
        print(f"The tests do not pass without a fault: {said}")
        return 1
    unnoticed = 0
    for name, fault in faults.items():
        started = time.monotonic()
        passed, said = run(copy_of_sources(name, fault), fault.tests)
        noticed = not passed and said.startswith("FAILED")  # not where pytest itself could not begin
        unnoticed += not noticed
        verdict = "noticed" if noticed else "NOT NOTICED"
        print(f"{name} (promise {fault.promise}): {verdict} in {time.monotonic() - started:.0f} s: {said}", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
