"""The plugin that lets the tests of one folder run in the strict process, each as an ordinary item of this session."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.device.building import BuildError, build
from tests.device.loading import BACKEND
from tests.device.process import ProcessError, StrictProcess

LIMIT = pytest.StashKey[float]()


class Elsewhere:
    """Runs the items below a folder in a process of their own, started for the first one, and anew after a crash."""

    def __init__(
        self,
        config: pytest.Config,
        folder: Path,
        *,
        backend: str = BACKEND,
        library: Callable[[], Path | None] = build,
    ) -> None:
        self.config = config
        self.folder = folder
        self.backend = backend
        self.library = library
        self.process: StrictProcess | None = None
        self.started = 0
        self.unavailable = ""  # why no process can be started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._runs(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        for report in _torn_down(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        if not self._runs(item):
            return None
        item.stash[LIMIT] = settings.timeout  # pytest-timeout's own timer would interrupt the wait
        return True

    def pytest_sessionfinish(self) -> None:
        if self.process is not None:
            try:
                self.process.close()
            except ProcessError as error:
                warnings.warn(pytest.PytestWarning(f"after its last test {error}"), stacklevel=1)

    def _runs(self, item: pytest.Item) -> bool:
        return item.path.is_relative_to(self.folder)

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """As they come about; the last is of this process's making where the other one did not get to the end."""
        following = nextitem.nodeid if nextitem is not None and self._runs(nextitem) else None
        when, start = "setup", time.time()
        try:
            process = self._start(item.session)
            start = time.time()
            for kind, content in process.run(item.nodeid, following, item.stash.get(LIMIT, None)):
                if kind == "report":
                    report = self.config.hook.pytest_report_from_serializable(config=self.config, data=content)
                    when = "call" if report.when == "setup" and report.passed else "teardown"
                    self._show(report)
                    yield report
                elif kind == "warning":
                    self._warn(*content)
                else:
                    yield _failure(item, when, start, f"the strict process did not collect this\n{content}")
        except (BuildError, ProcessError) as error:
            printed = self.process.printed() if self.process else ""
            self.process = None
            yield _failure(item, when, start, str(error), printed)
        except BaseException:
            if self.process is not None:
                self.process.kill()  # an interrupt: the end of the session waits for no test
                self.process = None
            raise

    def _start(self, session: pytest.Session) -> StrictProcess:
        if self.unavailable:
            raise ProcessError(self.unavailable)
        if self.process is None:
            try:
                folder = self.config.invocation_params.dir
                self.process = StrictProcess(self.library(), self.backend, folder, self._arguments(session))
            except (BuildError, ProcessError) as error:
                self.unavailable = f"{error}\n(and so no other test in the strict process can run)"
                raise
            self.started += 1
        return self.process

    def _arguments(self, session: pytest.Session) -> list[str]:
        """What pytest is told there: options that concern a single item are the same, none that select or sum up."""
        option, inipath = self.config.option, self.config.inipath
        temporary = self.config._tmp_path_factory.getbasetemp() / f"strict{self.started}"
        return [
            f"--rootdir={self.config.rootpath}",
            *(["-c", str(inipath)] if inipath is not None else []),
            f"--import-mode={option.importmode}",
            f"--tb={option.tbstyle}",
            *(["--showlocals"] if option.showlocals else []),
            *(["-" + "v" * option.verbose] if option.verbose > 0 else []),  # how much of a comparison is shown
            *(f"-W{text}" for text in option.pythonwarnings or []),
            *(f"--override-ini={text}" for text in option.override_ini or []),
            *("-m", "", f"--basetemp={temporary}", "--capture=no", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
            *sorted({str(item.path) for item in session.items if self._runs(item)}),
        ]

    def _show(self, report: pytest.TestReport) -> None:
        if self.config.option.capture == "no":
            for name, text in report.sections:
                if name.endswith(report.when or ""):
                    sys.stdout.write(text)

    def _warn(self, text: str, category: type[Warning], file: str, line: int, about: dict[str, Any]) -> None:
        message = warnings.WarningMessage(category(text), category, file, line)
        self.config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **about})


def _torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """What earlier items have set up in this process, and the next one does not need, goes here as after any item."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    return [pytest.TestReport.from_item_and_call(item, call)] if call.excinfo is not None else []


def _failure(item: pytest.Item, when: Any, start: float, text: str, printed: str = "") -> pytest.TestReport:
    stop = time.time()
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when=when,
        sections=[(f"Captured stdout {when}", printed)] if printed else [],
        duration=stop - start,
        start=start,
        stop=stop,
    )
