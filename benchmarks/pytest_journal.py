"""A plugin of pytest (`-p pytest_journal`): each test is a row of the journal as soon as it is over."""

import time

import pytest
from journal import Journal, give_up_without_device

LONGEST_REASON = 3000


class _Rows:
    def __init__(self) -> None:
        self._journal = Journal()
        self._started = 0.0
        self._outcome: tuple[str, str] = ("passed", "")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what began in a process before this one."""
        items[:] = [item for item in items if item.nodeid not in self._journal.begun]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self._journal.begun:
            self._journal.begin(report.nodeid)
            self._journal.end(report.nodeid, "failed", 0.0, str(report.longrepr)[-LONGEST_REASON:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started, self._outcome = time.perf_counter(), ("passed", "")
        self._journal.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = f"{self._outcome[1]}\n{report.longrepr}" if self._outcome[0] == "failed" else str(report.longrepr)
            self._outcome = "failed", reason[-LONGEST_REASON:]
        elif report.skipped and self._outcome[0] == "passed":
            self._outcome = "skipped", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        status, reason = self._outcome
        self._journal.end(nodeid, status, time.perf_counter() - self._started, reason)
        if status == "failed":
            give_up_without_device()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Rows())
