"""`penstock doctor`: its table, its JSON and its exit status."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import doctor
from penstock.doctor import Finding, Verdict

FINE = Finding("huge pages", Verdict.FINE, "madvise")
SLOW = Finding("cores", Verdict.SLOW, "[bold]2", "Raise [red]it.")
BROKEN = Finding("device", Verdict.BROKEN, "none", "Install one.")


@pytest.mark.parametrize(
    ("found", "status", "last"),
    [([FINE], 0, "All is as it should be."), ([FINE, SLOW], 0, "1 to mend."), ([SLOW, BROKEN], 1, "2 to mend.")],
)
def test_the_table_the_json_and_the_status(
    found: list[Finding], status: int, last: str, penstock_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(doctor, "examine", lambda folders: asked.append(folders) or found)
    monkeypatch.setenv("COLUMNS", "120")
    outcome = penstock_command("doctor", "--folders", "a", "--folders", "b")
    assert (outcome.exit_code, outcome.err, asked) == (status, "", [[Path("a"), Path("b")]])
    lines = [line.strip() for line in outcome.out.splitlines()]
    assert lines[-1] == last
    for finding in found:
        row = next(line for line in lines if line.startswith(finding.about))
        assert row.split(maxsplit=finding.about.count(" ") + 1)[-1].split() == [finding.verdict, finding.found]
        assert not finding.mend or finding.mend in lines

    outcome = penstock_command("doctor", "--json")
    assert outcome.exit_code == status
    assert json.loads(outcome.out) == {"broken": bool(status), "findings": [each._asdict() for each in found]}
