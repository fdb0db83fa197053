"""The parts of `bench.py`: which benchmark each runs, with which arguments, and how its report is read."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import bench_figures as figures
from bench_figures import Reader


@dataclass(frozen=True)
class Part:
    """A benchmark of this folder.

    Attributes:
        script: its file.
        what: what it measures, in a few words.
        contenders: whom its option `--contenders` gets; empty where it has no such option.
        peers: who joins them where an environment lends its packages.
        full, quick: its arguments, beside those that every part gets.
        read: makes figures of its report.
        needs: a program that has to be installed; empty for none.
        takes: which of `--folder` and `--threads` it understands.
    """

    script: str
    what: str
    read: Reader
    full: tuple[str, ...]
    quick: tuple[str, ...]
    contenders: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    needs: str = ""
    takes: tuple[str, ...] = ("folder", "threads")

    def asked(self, *, peers: bool) -> tuple[str, ...]:
        """The contenders by name."""
        return self.contenders + (self.peers if peers else ())

    def arguments(self, *, quick: bool, peers: bool, given: Mapping[str, str]) -> list[str]:
        """The command line of the script."""
        line = [self.script, *(self.quick if quick else self.full)]
        if self.contenders:
            line += ["--contenders", ",".join(self.asked(peers=peers))]
        for name in self.takes:
            line += [f"--{name}", given[name]]
        return line

    def lacks(self, which: Callable[[str], str | None] = shutil.which) -> str:
        """Why it cannot run here; empty where it can."""
        return f"{self.needs} is not installed" if self.needs and which(self.needs) is None else ""


def _reader(read: Callable[..., Any], **settings: Any) -> Reader:
    return partial(read, **settings)


PARTS: dict[str, Part] = {
    "step-cpu": Part(
        "step.py",
        "a training step with everything on the cpu tier",
        figures.of_step,
        full=("--rounds", "7"),
        quick=("--model", "tiny", "--rounds", "4", "--warmup", "1", "--sequence", "64"),
        contenders=("plain", "penstock", "fsdp2"),
        peers=("deepspeed",),
    ),
    "step-tuned": Part(
        "step.py",
        "the same with a malloc that keeps its memory, for all of them",
        figures.of_step,
        full=("--rounds", "7", "--malloc", "tuned"),
        quick=("--model", "tiny", "--rounds", "4", "--warmup", "1", "--sequence", "64", "--malloc", "tuned"),
        contenders=("plain", "penstock"),
    ),
    "step-nvme": Part(
        "step.py",
        "a training step with the optimizer's state in files; the disk alone moves the same bytes",
        _reader(figures.of_step, base="disk"),
        full=("--tier", "nvme", "--rounds", "5", "--warmup", "1"),
        quick=("--tier", "nvme", "--model", "tiny", "--rounds", "4", "--warmup", "1", "--sequence", "64"),
        contenders=("disk", "penstock"),
        peers=("deepspeed",),
    ),
    "step-files": Part(
        "step.py",
        "a training step with everything in files",
        _reader(figures.of_step, base="disk"),
        full=("--tier", "files", "--rounds", "4", "--warmup", "1", "--malloc", "tuned"),
        quick=("--tier", "files", "--model", "tiny", "--rounds", "4", "--warmup", "1", "--sequence", "64"),
        contenders=("plain", "disk", "penstock"),
    ),
    "rules": Part(
        "rules.py",
        "the update of one flat tensor on the host, beside what memory allows",
        figures.of_rules,
        full=("--numel", "100e6"),
        quick=("--numel", "4e6", "--rounds", "5"),
        takes=("threads",),
    ),
    "disk": Part(
        "io.py",
        "reads and writes of files past the page cache, beside fio",
        figures.of_disk,
        full=("--size", "1024"),
        quick=("--size", "64", "--turn", "40", "--requests", "8", "--rounds", "3"),
        needs="fio",
        takes=("folder",),
    ),
    "checkpoint": Part(
        "checkpoint.py",
        "saving and loading a whole training state, beside torch's and the disk alone",
        figures.of_checkpoint,
        full=("--model", "100m"),
        quick=("--model", "tiny", "--rounds", "4"),
    ),
    "moves": Part(
        "residency.py",
        "states that leave the device and come back, beside plain copies",
        figures.of_moves,
        full=(),
        quick=("--model", "tiny", "--rounds", "5"),
    ),
    "small": Part(
        "small.py",
        "steps of layers of ten small parameters: the host's time",
        figures.of_small,
        full=("--layers", "64", "256"),
        quick=("--layers", "64", "--rounds", "4", "--warmup", "1", "--steps", "2"),
        contenders=("plain", "fsdp2", "penstock device", "penstock cpu", "penstock nvme"),
    ),
    "start": Part(
        "start.py",
        "imports and the command line's help, in new processes",
        figures.of_start,
        full=(),
        quick=("--rounds", "2"),
        takes=(),
    ),
    "prepare": Part(
        "prepare.py",
        "prepare with the values of a folder, beside the disk alone",
        figures.of_prepare,
        full=(),
        quick=("--rounds", "4"),
    ),
}
