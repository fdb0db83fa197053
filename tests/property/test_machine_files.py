"""Files of machines: what is written is read again, and what somebody wrote is a machine or refused in one line.

Every run draws the same examples; `make fuzz` draws others, and more.
"""

import json
import os
import string
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.planner.machine import Machine
from penstock.planner.rates import RATES, Rate, parse_rate
from tests.lib.fuzz import examples

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=20)  # surrogates too: what a file may have escaped
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))
FINITE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
FINGERPRINTS = st.dictionaries(TEXTS, FINITE | st.lists(FINITE, max_size=3), max_size=5)


@st.composite
def figures(draw: st.DrawFn, name: str) -> Rate:
    if RATES[name].unit == "count":
        counts = sorted(draw(st.lists(st.integers(1, 1 << 60), min_size=3, max_size=3)))
        return Rate(counts[1], counts[0], counts[2], draw(TEXTS))
    low, value, high = sorted(draw(st.lists(POSITIVE, min_size=3, max_size=3)))
    return Rate(value, low, high, draw(TEXTS))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    names = draw(st.sets(st.sampled_from(list(RATES)), max_size=8))
    return Machine(
        draw(st.text(min_size=1, max_size=200)),
        draw(st.sampled_from(["cpu", "cuda", "xpu", "npu"])),
        {name: draw(figures(name)) for name in names},
        draw(FINGERPRINTS),
        draw(st.booleans()),
    )


@given(machine=machines())
@examples(30)
def test_what_is_written_is_read(tmp_path: Path, machine: Machine) -> None:
    file = tmp_path / "machine.json"
    machine.write(file)
    again = Machine.read(file)
    assert again == machine
    assert list(again.figures) == list(machine.figures)
    assert os.listdir(tmp_path) == ["machine.json"]
    assert str(machine).isascii() or all(each.isprintable() for each in str(machine).splitlines())


def read_or_refused(file: Path) -> Machine | None:
    machine, said = None, str(file)
    try:
        machine = Machine.read(file)
    except penstock.ConfigError as error:
        said = str(error)
    assert said.startswith(str(file))
    assert said.isprintable()
    assert len(said) < 3000
    str(machine)
    return machine


NAMES = st.sampled_from(list(RATES)) | TEXTS
GIVEN = JSON | POSITIVE | st.fixed_dictionaries({}, optional=dict.fromkeys(("value", "low", "high", "how"), LEAVES))
NEARLY = st.fixed_dictionaries(
    {"penstock": st.just("machine"), "version": st.just(1) | LEAVES, "name": TEXTS | JSON, "device": st.just("cuda")},
    optional={
        "figures": st.dictionaries(NAMES, GIVEN, max_size=5) | JSON,
        "probed": st.booleans() | JSON,
        "fingerprint": JSON,
        "more": JSON,
    },
)


@given(content=NEARLY)
@examples(60)
def test_nearly_a_machine_is_one_or_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(content))
    machine = read_or_refused(file)
    if machine is not None:
        machine.write(file)
        assert Machine.read(file) == machine


SIGNS = st.text(string.digits + string.ascii_letters + "./+-=µ \n", max_size=12)


@given(name=NAMES, written=SIGNS | TEXTS)
@examples(60)
def test_any_text_is_a_figure_or_refused(name: str, written: str) -> None:
    said = ""
    try:
        parsed, value = parse_rate(f"{name}={written}")
    except penstock.ConfigError as error:
        said = str(error)
    else:
        assert parsed == name.strip()
        assert 0 < value < float("inf")
    assert said.isprintable()
    assert len(said) < 2000
