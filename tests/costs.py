"""The plugin that adds up what each file of tests costs, and reports it: the ten dearest, and those above their line.

Costs are CPU seconds of the process that runs the tests and of all below it: on a machine that others use too, seconds
of the clock say little. They are divided by how slow the host is at a fixed piece of work, done again at each file.

It is a report, and never an exit status: seconds differ between machines, and with what else runs there.
"""

import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

MEASURED = "PENSTOCK_TESTS_MEASURED"  # in the environment of all that a measured session starts
TESTS = Path(__file__).parent
SUITE_SECONDS = 1150  # of all files in `make test`: ten minutes on two quiet cores
FILE_SECONDS = 15.0  # of one file
DEAREST = 10  # files that are named
WORK_SECONDS = 0.001  # of `fixed_work`, on the quiet machine that the lines are of
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def runs_integrations(config: pytest.Config) -> bool:
    """Whether a session runs the loops of other libraries, which have no lines: most of it is those libraries."""
    asked: str = config.option.markexpr
    return "integrations" in asked and "not integrations" not in asked


def fixed_work() -> None:
    """Do what tests mostly do: run Python that makes and drops objects."""
    for number in range(40):
        pairs = {str(n): (n, number) for n in range(100)}
        sorted(pairs.values(), key=lambda pair: pair[0] ^ 21)


def work_seconds() -> float:
    """Time the fixed work; the better of two, so that one interruption does not count."""
    taken = []
    for _ in range(2):
        start = time.thread_time()
        fixed_work()
        taken.append(time.thread_time() - start)
    return min(taken)


def cpu_seconds() -> float:
    """Add up what this process has used, and those below it, running or ended."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it ended just now
            continue
        children[int(fields[1])].append(int(name))
        used[int(name)] = sum(map(int, fields[11:15])) / TICKS_PER_SECOND  # its own, and of children waited for
    below = [os.getpid()]
    for process in below:
        below += children[process]
    return sum(used.get(process, 0.0) for process in below)


def report(costs: Mapping[str, float]) -> list[str]:
    """Write the total, and the files that cost most or are above their line; files are named below `tests/`."""
    ranked = Counter(costs).most_common()
    lines = [f"{sum(costs.values()):7.1f} of {SUITE_SECONDS} in {len(ranked)} files"]
    for place, (name, seconds) in enumerate(ranked):
        is_above = seconds > FILE_SECONDS
        if is_above or place < DEAREST:
            lines.append(f"{seconds:7.1f} tests/{name}{f', above {FILE_SECONDS:g}' if is_above else ''}")
    return lines


class Meter:
    """Measures in every process that runs tests; a worker's numbers go to the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.costs: Counter[str] = Counter()
        self.measured: Counter[str] = Counter()  # of this process, as yet in its own seconds
        self.paces: list[float] = []
        self.since: float | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        if self.since is None:
            self.since = cpu_seconds()
        try:
            return (yield)
        finally:
            # Looking at all processes takes longer than most tests: once a run of tests of one file.
            if nextitem is None or nextitem.path != item.path:
                self.measured[item.path.relative_to(TESTS).as_posix()] += cpu_seconds() - self.since
                self.paces.append(work_seconds())
                self.since = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.costs.update(getattr(node, "workeroutput", {}).get("costs", {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        slowness = statistics.median(self.paces) / WORK_SECONDS if self.paces else 1.0
        self.costs.update({name: seconds / slowness for name, seconds in self.measured.items()})
        self.measured.clear()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = dict(self.costs)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("CPU seconds (a report: it fails nothing)")
        for line in report(self.costs):
            terminalreporter.write_line(line)
