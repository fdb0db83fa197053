"""The plugin that adds up what each file of tests costs, and compares it with `tests/budget.py`.

Costs are CPU seconds of the process that runs the tests and of all below it: on a machine that others use too, seconds
of the clock say little. They are divided by how slow the host is at a fixed piece of work, done again at each file.
"""

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.budget import Costs, findings

MEASURED = "PENSTOCK_TESTS_MEASURED"  # in the environment of all that a measured session starts
COSTS_FILE = "PENSTOCK_TESTS_COSTS"  # in the environment: a file for the numbers, to set budgets by
TESTS = Path(__file__).parent
WORK_SECONDS = 0.001  # of `fixed_work`, on the quiet machine that the budgets are of
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def runs_integrations(config: pytest.Config) -> bool:
    """Whether a session runs the loops of other libraries, which have no budgets: most of it is those libraries."""
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


class Meter:
    """Measures in every process that runs tests; a worker's numbers go to the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.costs: dict[str, Costs] = defaultdict(Costs)
        self.measured: dict[str, Costs] = defaultdict(Costs)  # of this process, as yet in its own seconds
        self.paces: list[float] = []
        self.since: float | None = None
        self.over: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        if self.since is None:
            self.since = cpu_seconds()
        thorough = item.get_closest_marker("thorough") is not None
        try:
            return (yield)
        finally:
            # Looking at all processes takes longer than most tests: once a run of tests of one file and kind.
            same = nextitem is not None and nextitem.path == item.path
            if not same or (nextitem.get_closest_marker("thorough") is not None) != thorough:
                now = cpu_seconds()
                name = item.path.relative_to(TESTS).as_posix()
                self.measured[name].add(now - self.since, thorough)
                self.paces.append(work_seconds())
                self.since = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        for name, (quick, thorough) in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.costs[name].add(quick, False)
            self.costs[name].add(thorough, True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        slowness = statistics.median(self.paces) / WORK_SECONDS if self.paces else 1.0
        for name, costs in self.measured.items():
            self.costs[name].add(costs.quick / slowness, False)
            self.costs[name].add(costs.thorough / slowness, True)
        self.measured.clear()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = {name: (c.quick, c.thorough) for name, c in self.costs.items()}
        else:
            self.over = findings(self.costs)
            if COSTS_FILE in os.environ:
                numbers = {name: (round(c.quick, 1), round(c.thorough, 1)) for name, c in sorted(self.costs.items())}
                Path(os.environ[COSTS_FILE]).write_text(json.dumps(numbers, indent=0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.over:
            terminalreporter.section("CPU seconds above the budget (a report: it fails nothing)")
            for line in self.over:
                terminalreporter.write_line(line)
