"""The process with the strict device: runs the tests that it is sent, in one session of pytest.

The session collects once, and its loop runs an item per request: fixtures of modules and of the session live as long as
in an ordinary run, and an item costs milliseconds. Each goes through the whole `pytest_runtest_protocol`, with all that
plugins wrap around it.

pytest captures nothing here, since what it captured would go with a process that crashes. The outputs are files, which
the other process reads too, and a report gets what was written meanwhile.
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys
import warnings
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.device.loading import HERE, load

PR_SET_PDEATHSIG = 1


class Serving:
    """Takes requests, `(node id, node id of the next item)`, and answers each with messages `(kind, content)`.

    "ready" comes once, before all requests. Then reports and warnings as they come about and "done", or "unknown".
    """

    def __init__(self, connection: Connection, outputs: dict[str, int]) -> None:
        self.connection = connection
        self.outputs = outputs
        self.not_collected: list[str] = []

    def _send(self, message: tuple[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # at the end of the session nobody listens any more
            self.connection.send(message)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config
        config.pluginmanager.unregister(name="terminalreporter")  # it would write among what tests write

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_collected.append(f"{report.nodeid}:\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._send(("ready", None))
        with contextlib.suppress(EOFError, ConnectionResetError):  # no more requests
            while True:
                nodeid, following = self.connection.recv()
                if nodeid in items:
                    self.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=items.get(following))
                    self._send(("done", None))
                else:
                    self._send(("unknown", "\n".join(self.not_collected)))
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool | None:
        return None if settings.func_only else True  # over the whole of an item the other process watches

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._with_output(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._with_output(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._with_output(item, "teardown"))

    def _with_output(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        starts = {name: os.fstat(number).st_size for name, number in self.outputs.items()}
        try:
            return (yield)
        finally:
            for name, number in self.outputs.items():
                if written := os.pread(number, os.fstat(number).st_size - starts[name], starts[name]):
                    item.add_report_section(when, name, written.decode(errors="replace"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._send(("report", data))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        # A class of the tests' own need not exist in the other process: it goes by its name.
        text, category = str(warning_message.message), warning_message.category
        if category.__module__ != "builtins":
            text, category = f"{category.__name__}: {text}", Warning
        place = (warning_message.filename, warning_message.lineno)
        about = {"when": when, "nodeid": nodeid, "location": location}
        self._send(("warning", (text, category, *place, about)))


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that hangs does not outlive what waits for it
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    outputs = {"stdout": os.dup(1), "stderr": os.dup(2)}  # `capfd` takes the usual numbers away for a time
    faulthandler.enable(outputs["stderr"])
    os.environ[HERE] = "1"
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    connection = Connection(number)
    library, backend, folder, arguments = connection.recv()
    load(library, backend)
    os.chdir(folder)
    code = pytest.main(arguments, plugins=[Serving(connection, outputs)])
    usual = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    sys.exit(0 if code in usual else code)


if __name__ == "__main__":
    main()
