"""What is read of a run's folder, whatever is in it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.reporting import run as reading
from penstock.cli.reporting.page import page
from penstock.cli.reporting.run import flattened, read_run
from penstock.errors import ConfigError, shown


def write(folder: Path, *lines: Any, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end)
    return folder


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, **values}


def test_what_several_lines_say_of_a_step_is_put_together(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, step(1, lr=0.1, step_seconds=0.5), step(2, lr=0.2), step(1, loss=3.0, tokens=8)))
    assert run.steps == [1, 2]
    assert run.figures[1] == {
        "step": 1, "lr": 0.1, "step_seconds": 0.5, "loss": 3.0, "tokens": 8, "tokens_per_second": 16.0
    }  # fmt: skip
    assert run.column("loss") == [3.0, None]
    assert run.names() == ["lr", "loss", "tokens_per_second"]


def test_rates_of_groups_are_figures_of_their_own(tmp_path: Path) -> None:
    assert read_run(write(tmp_path, step(1, lr=[0.1, 0.2]))).figures[1] == {
        "step": 1, "lr": 0.1, "lr 0": 0.1, "lr 1": 0.2
    }  # fmt: skip


def test_a_last_line_that_is_torn_is_passed_over_even_where_what_is_there_of_it_is_whole(tmp_path: Path) -> None:
    """A number of which the last digits are missing is another number."""
    for torn in ('{"event": "step", "step": 2, "lo', json.dumps(step(2, loss=1))):
        run = read_run(write(tmp_path, step(1, loss=1.0), torn, end=""))
        assert (run.steps, run.unread) == ([1], 0)


@pytest.mark.parametrize("bad", ["{", "[1]", "null", '"x"', "[" * 100_000, "\x00", '{"event": NaN'])
def test_a_line_that_cannot_be_read_is_counted_and_left_out(tmp_path: Path, bad: str) -> None:
    run = read_run(write(tmp_path, step(1), bad, step(2)))
    assert (run.steps, run.unread) == ([1, 2], 1)


@pytest.mark.parametrize("value", [None, "1", True, [1], {"a": 1}, float("nan"), float("inf"), 10**400])
def test_what_is_no_number_is_not_known(tmp_path: Path, value: Any) -> None:
    run = read_run(write(tmp_path, step(1, loss=value, bytes_by_tier={"cpu": value, "device": 2}, waits=value)))
    assert run.column("loss") == [None]
    assert run.bytes_by_tier == {1: {"device": 2}}


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        (step(1, loss=1e299, tokens=10**31), ["loss", "tokens"]),
        (step(1, bytes_by_tier=[1], waits=3), ["bytes_by_tier", "waits"]),
        (step(1, bytes_by_tier={"cpu": float("inf")}), ["bytes_by_tier.cpu"]),
        (step(1, tokens=1e29, step_seconds=1e-300), ["tokens_per_second"]),
        ({"event": "eval", "step": 1, "loss": -1e31}, ["loss"]),
        ({"event": "placement", "step": 1, "rows": [{"nbytes": 1e300}]}, ["placement.nbytes"]),
        (step(1, loss=None, waits={}), []),
    ],
)
def test_what_cannot_be_drawn_is_left_out_and_named(tmp_path: Path, line: Any, odd: list[str]) -> None:
    run = read_run(write(tmp_path, step(1), line))
    assert list(run.odd) == odd
    written = page([run], "")
    assert (f"left out, because it cannot be drawn: {', '.join(odd)}." in written) == bool(odd)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X", "cat": "read"}]}', "[" * 100_000]
)
def test_a_file_beside_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    run = read_run(write(tmp_path, step(1)))
    assert not run.odd
    (tmp_path / "trace.json").write_text(text)
    (tmp_path / "plan.json").write_text(text.replace("{}", "{"))
    run = read_run(tmp_path)
    assert (run.timeline, list(run.odd)) == (None, ["plan.json", "trace.json"] if "E" not in text else ["trace.json"])


ODD = (1e299, math.inf, math.nan, 10**400, 10**4000, -1, 5e-324, [], [[1]], {}, {"a": {"b": []}}, "x", True, None)


@pytest.mark.parametrize("odd", ODD, ids=lambda value: shown(value)[:20])
def test_a_page_is_made_whatever_a_value_is(tmp_path: Path, odd: Any) -> None:
    """One odd number ended it with a traceback: here each value of a line, of a plan and of a trace is."""
    lines = [
        {"event": "start", "begin": odd, "world_size": odd, "config": {"a": odd, "b": [odd]}},
        step(1, loss=1.0, tokens=8, step_seconds=0.5),
        {name: odd for name in ("loss", "lr", "tokens", "step_seconds", "bytes_by_tier", "waits")} | step(2),
        step(3, bytes_by_tier={"cpu": odd}, waits={"read": odd}, lr=[odd, odd], loss_scale=odd, own=odd),
        *(
            {"event": event, "step": 3, "loss": odd, "rows": odd, "text": odd}
            for event in ("eval", "placement", "sample")
        ),
        {"event": "placement", "step": 3, "rows": [dict.fromkeys(("unit", "kind", "tier", "nbytes"), odd), odd]},
        {"event": "end", "seconds": odd},
    ]
    write(tmp_path, *lines)
    (tmp_path / "plan.json").write_text(
        json.dumps({"step_s": odd, "busy_s": odd, "bytes": odd, "peak_bytes": {"cpu": odd}})
    )
    span = {"ph": "X", "cat": "compute", "name": odd, "ts": 1.0, "dur": 2.0, "args": {"bytes": odd}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [span, {**span, "dur": odd}, odd]}))
    run = read_run(tmp_path)
    assert page([run, run], "").endswith("</html>\n")


def test_a_line_without_an_end_and_a_file_without_one_are_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_LINE_BYTES", 1 << 10)
    run = read_run(write(tmp_path, step(1), "x" * 5000, step(2), json.dumps(step(3)) + " " * 2000, step(4)))
    assert (run.steps, run.unread) == ([1, 2, 4], 2)
    monkeypatch.setattr(reading, "_MOST_BYTES", 1 << 12)
    with open(tmp_path / "metrics.jsonl", "r+b") as file:
        file.truncate(1 << 40)  # takes no space
    assert read_run(tmp_path).steps == [1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "trace.json"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write(tmp_path, step(1))
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        if name == "metrics.jsonl":
            with pytest.raises(ConfigError, match=r"metrics\.jsonl: it is no file"):
                read_run(tmp_path)
        else:
            assert list(read_run(tmp_path).odd) == [name]


@pytest.mark.parametrize("number", [-1, True, 1.5, "1", None, 1 << 60])
def test_a_step_without_a_number_is_passed_over(tmp_path: Path, number: Any) -> None:
    assert read_run(write(tmp_path, step(1), step(number, loss=2.0))).steps == [1]


def test_what_came_after_the_point_that_a_run_goes_on_from_is_forgotten(tmp_path: Path) -> None:
    lost = [step(3, loss=9.0), {"event": "eval", "step": 3, "loss": 9.0}]
    lost += [{"event": "sample", "step": 3, "prompt": "", "text": "lost"}]
    goes_on = {"event": "start", "begin": 2}
    run = read_run(write(tmp_path, {"event": "start"}, step(1), step(2), *lost, goes_on, step(3, loss=1.0)))
    assert run.column("loss") == [None, None, 1.0]
    assert (run.evaluations, run.samples) == ({}, [])


def test_lines_of_penstock_train_are_read_as_they_are(tmp_path: Path) -> None:
    of_step = {"loss": 2.5, "grad_norm": 0.7, "lr": 1e-3, "tokens_per_second": 100.0, "seconds": 10.0}
    waits = {"waited": 0.12, "waits": {"fetch": 0.12}, "bound_by": "host update"}
    run = read_run(
        write(
            tmp_path,
            {"event": "start", "config": {"model": "tiny"}, "world_size": 2},
            {"event": "eval", "step": 0, "loss": 5.5, "perplexity": 244.0, "seconds": 0.25},
            step(20, **of_step, **waits, bytes_by_tier={"cpu": 8}),
            {"event": "placement", "step": 20, "rows": [{"unit": "u", "kind": "param", "tier": "cpu", "nbytes": 8}, 3]},
            {"event": "sample", "step": 20, "prompt": "the ", "text": "fox"},
            {"event": "end", "seconds": 9.0},
        )
    )
    assert run.evaluations == {0: 5.5}
    assert run.waits == {20: {"fetch": 0.12}}
    assert [row["kind"] for row in run.placement] == ["param"]
    assert (run.samples[0].prompt, run.samples[0].text, run.end) == ("the ", "fox", {"seconds": 9.0})


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*Name the --out of a penstock train"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="has no line of a run"):
        read_run(write(tmp_path, "of an earlier run"))


def test_settings_are_names_and_texts() -> None:
    nested: dict[str, Any] = {"a": {"b": {"c": 1}}, "list": [1, "x"], "none": None, "flag": False}
    assert dict(flattened(nested)) == {"a.b.c": "1", "list": "1, x", "flag": "False"}
