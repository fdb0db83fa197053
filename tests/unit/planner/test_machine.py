"""A machine as a value, and as a file that may be anybody's."""

import json
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError
from penstock.planner.machine import Machine, Rate, from_probe, shipped

DISK = Rate(7e9, 6e9, 8e9, "read 256 MiB in records of 4 MiB")


def machine(**figures: Rate) -> Machine:
    return Machine("box", "cuda", figures or {"disk_read": DISK}, {"processor": "some", "cores": 8}, probed=True)


def refusal(work: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        work(*arguments, **named)
    message = str(raised.value)
    assert message.isprintable(), "one line, that steers no terminal"
    assert message.endswith(".")
    assert ". ." not in message
    assert not message.endswith("..")
    assert len(message) < 2000
    return message


# The value
Work = Callable[[], Any]
MISSED = "The machine 'box' has no figure "
REFUSED: list[tuple[Work, str]] = [
    (
        lambda: machine().value("disk_write"),
        f"{MISSED}disk_write (bytes/s: written into one folder, a record at a time). Name folders when the machine is "
        "probed, or state it: disk_write=NUMBER.",
    ),
    (lambda: machine().replace(folders=1.5), "'folders' is 1.5: use a whole number: it counts folders for files"),
    (lambda: Machine("box", "cuda:0", {}), "'device' is 'cuda:0': use a kind of device: cuda, or cpu."),
    (
        lambda: Machine("box", "cuda", {}, {}, True, 1),  # type: ignore[arg-type]
        "'unified_memory' is 1: use true or false.",
    ),
    *(
        (lambda value=value: Machine("box", "cuda", {}, {"it": value}), "'fingerprint' is nothing that JSON can hold (")
        for value in (object(), float("nan"), {(1, 2): 3})
    ),
    (lambda: machine().write("/none/machine.json"), "/none/machine.json cannot be written: No such file or directory"),
    (lambda: machine().write("a\0b"), "a\\x00b cannot be written: embedded null byte"),
]


@pytest.mark.parametrize(("work", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_what_is_no_machine_or_no_figure_is_refused(work: Work, says: str) -> None:
    assert refusal(work).startswith(says)


# Probing


HERE = {"cpu": "x", "cores": 2, "device": "cpu"}
ON_CUDA = HERE | {"device": "cuda", "devices": 1, "device_name": "Other"}
H100 = ON_CUDA | {"device_name": "NVIDIA H100 80GB HBM3"}
COLD = "a sum; 1 run, then the time was up"


def test_a_probe_is_made_of_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def measure(**arguments: Any) -> tuple[Any, ...]:
        asked.update(arguments)
        return {"disk_read": Rate(7e9, 6e9, 8e9, "three times")}, HERE

    module = types.ModuleType("penstock.probe.measure")
    module.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.probe.measure", module)
    made = Machine.probe(folders=(tmp_path, "/tmp"), seconds=5)
    assert made == Machine("x, 2 cores", "cpu", {"disk_read": Rate(7e9, 6e9, 8e9, "three times")}, HERE, True)
    assert asked == {"folders": [tmp_path, "/tmp"], "seconds": 5}


@pytest.mark.parametrize(
    ("name", "value"), [("device_bandwidth", 9e9), ("op_seconds", 5e-10), ("flops_bfloat16", 1.6e11)]
)
def test_what_a_device_cannot_have_is_not_written_as_measured(name: str, value: float) -> None:
    figure = from_probe({name: Rate.stated(value, COLD)}, H100).figures[name]
    sheet = Machine.read("h100-node").figures[name]
    assert (figure.value, figure.low, figure.high) == (sheet.value, sheet.low, sheet.high)
    assert figure.how.startswith(f"not measured: {sheet.how}. {name} was measured as")


def test_a_desktop_is_held_against_the_data_sheet_of_its_accelerator() -> None:
    """Machines of one accelerator named it without a number, so that none was found."""
    measured = {"device_bandwidth": Rate.stated(60e9, COLD)}  # which another kind of device might have
    made = from_probe(measured, ON_CUDA | {"device_name": "NVIDIA GeForce RTX 4090"})
    assert made.figures["device_bandwidth"].how.startswith("not measured: 0.9 (from 0.8 to 0.94, assumed) of 1.01 TB/s")


def test_a_figure_without_a_data_sheet_is_an_error_that_names_it() -> None:
    figures = {"device_bandwidth": Rate.stated(9.3e9, COLD)}
    text = "device_bandwidth was measured as 9.3e+09 bytes/s; machines like this one have "
    with pytest.raises(ConfigError, match=re.escape(text)):
        from_probe(figures, ON_CUDA)


def test_what_was_measured_stays_where_it_can_be() -> None:
    measured = {"device_bandwidth": Rate(2.9e12, 2.8e12, 3e12, "a sum"), "disk_read": Rate.stated(1e8, "a slow one")}
    for fingerprint in (H100, ON_CUDA, HERE):
        assert from_probe(measured, fingerprint).figures["disk_read"] == measured["disk_read"]
    assert from_probe(measured, H100).figures["device_bandwidth"].how == "a sum"


# Files


def test_a_machine_is_a_file_with_a_line_for_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    machine(disk_read=Rate(7e9, 6e9, 8e9, "read")).write(file)
    line = '  "disk_read": {"value": 7000000000.0, "low": 6000000000.0, "high": 8000000000.0, "how": "read"}'
    assert line in file.read_text().splitlines(), "which people can edit"
    assert os.listdir(tmp_path) == ["machine.json"]


def test_a_fingerprint_is_as_a_file_gives_it_back(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    listed = Machine("box", "cuda", {}, {"cards": ("one", "two"), "sizes": {1: 2}})
    assert listed.fingerprint == {"cards": ["one", "two"], "sizes": {"1": 2}}
    replace(listed, unified_memory=True).write(file)
    (tmp_path / "link").symlink_to(file)
    assert Machine.read(tmp_path / "link") == Machine.read(str(file)) == replace(listed, unified_memory=True)


def test_a_file_that_0_2_wrote_is_read_and_kept_as_it_was() -> None:
    file = Path(__file__).parents[2] / "data" / "planner" / "machine-0.2.json"
    figures = Machine.read(file).to_dict()["figures"]
    assert figures == json.loads(file.read_text())["figures"]


def test_what_cannot_be_written_or_read_again_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "Is a directory" in refusal(machine().write, tmp_path / "folder")
    long = machine(disk_read=Rate.stated(7e9, "x" * (1 << 20)))
    assert "would have 1,04" in refusal(long.write, tmp_path / "machine.json")
    assert os.listdir(tmp_path) == ["folder"]


HEAD = {"penstock": "machine", "version": 1, "name": "box", "device": "cuda"}


def with_figures(figures: object) -> str:
    return json.dumps(HEAD | {"figures": figures})


def with_others(**others: object) -> str:
    return json.dumps(HEAD | {"figures": {}} | others)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"penstock": "plan", "version": 1}', ': it has no "penstock": "machine"'),
        ('{"penstock": "machine", "version": 2}', ": its version is 2, and this Penstock reads 1. Mend it"),
        ('{"penstock": "machine", "version": 1}', ": 'name' is missing: add it. Mend it, or name another file."),
        (with_others(speed=1), ": 'speed' is no key that is read. Correct it, or leave it out."),
        (with_figures({"disk_raed": 7}), ": There is no figure 'disk_raed'. Did you mean disk_read? There are: "),
        (with_figures({"disk_read": 0}), ": 'figures.disk_read.value' is 0.0: use a number above 0."),
        (with_figures({"disk_read": {"value": 1, "low": 2}}), ": 'figures.disk_read' is no figure: low 2, value 1, "),
        ('{"penstock": "machine", "version": 1, "\\u001b[31m\\n": 1}', ": '\\x1b[31m' is no key that is read"),
    ],
)
def test_a_file_that_is_not_a_machines_is_refused(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    assert refusal(Machine.read, file).startswith(f"{file} is not read{says}")


def test_what_is_no_file_is_refused() -> None:
    for file, says in {
        "": "No such file or directory",
        "h100-node.json": "No such file or directory",
        "../machines/h100-node": "is not read: No such file",  # no name leads out of the folder of those
        b"machine.json": "is no path",
    }.items():
        assert says in refusal(Machine.read, file)


# Names


def test_a_name_is_of_a_machine_that_comes_along_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine().write("h100-node")
    assert Machine.read("h100-node").name == "h100-node"
    assert Machine.read(Path("h100-node")) == machine(), "a path is a file"
    assert Machine.read("./h100-node") == machine()
    machine().write("mine")
    assert Machine.read("mine") == machine()


@pytest.mark.parametrize(("name", "near"), [("h100", "h100-node"), ("zzzzzz", ""), ("x" * 500, "")])
def test_a_name_that_is_none_is_told_the_nearest_and_all(name: str, near: str) -> None:
    message = refusal(Machine.read, name)
    assert message.startswith("There is no machine or file '")
    assert near in message.partition("Did you mean ")[2]
    assert bool(near) is ("Did you mean" in message)
    assert message.endswith(f"There are: {', '.join(shipped())}.")
