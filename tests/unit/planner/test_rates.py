"""Figures: what a number may be, and how people write one."""

import math

import pytest

from penstock import ConfigError
from penstock.planner.rates import RATES, UNITS, Rate, parse_rate, write_value


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("disk_read=7GB/s", "disk_read", 7e9),
        ("disk_read=.5TB/s", "disk_read", 5e11),
        ("device_memory=24GiB", "device_memory", 24 * 2**30),
        ("flops_bfloat16=165TFLOP/s", "flops_bfloat16", 165e12),
        ("disk_seconds=80µs", "disk_seconds", 80e-6),
        ("disk_seconds=80μs", "disk_seconds", 80e-6),
        ("folders=2.0", "folders", 2),
    ],
)
def test_a_figure_is_read_as_people_write_it(text: str, name: str, value: float) -> None:
    assert parse_rate(text) == (name, value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("disk_read", "'disk_read' is no figure with its value. Write it as in disk_read=7GB/s."),
        ("disk_raed=7GB/s", "There is no figure 'disk_raed'. Did you mean disk_read? There are: devices, "),
        ("disk_read=7GB", "GB is no unit of disk_read, which is in bytes/s. Write a number with "),
        ("disk_read=56Gbps", "or nothing behind it; bits are not read."),
        ("disk_seconds=80GB/s", "GB/s is no unit of disk_seconds, which is in s. Write a number with s, ms, us,"),
        ("folders=1.5", "'folders' is 1.5: use a whole number: it counts folders for files"),
        ("disk_read=0", "disk_read=0: 'disk_read' is 0.0: use a number above 0. Write"),
        ("disk_read=" + "7" * 200, "no number is there"),
    ],
)
def test_what_is_no_figure_is_refused_in_a_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_rate(text)
    message = str(raised.value)
    assert says in message
    assert message.isprintable()
    assert message.endswith(".")
    assert ".." not in message.replace("...", "")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("disk_read", 7e9, "7.00 GB/s"),
        ("device_memory", 24 * 2**30, "24.0 GiB"),
        ("flops_bfloat16", 989e12, "989 TFLOP/s"),
        ("disk_seconds", 8e-5, "80.0 us"),
        ("folders", 2.0, "2"),
    ],
)
def test_a_value_is_written_in_its_unit(name: str, value: float, text: str) -> None:
    assert write_value(name, value) == text


def test_every_figure_has_a_unit_and_a_meaning_of_one_line() -> None:
    for name, about in RATES.items():
        assert name.isidentifier()
        assert about.unit in UNITS, name
        assert 10 < len(about.meaning) < 100, name
        assert about.meaning.isprintable()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((2, 3, 4), "low 3, value 2, high 4 are not in this order"),
        ((1, 1, math.inf), "'high' is inf: use a finite number."),
        ((10**400, 1, 1), "'value' is a number of 1329 bits: use a finite number."),
        ((1, 1, [1]), r"'high' is \[1\]: use a finite number."),
    ],
)
def test_a_figure_is_made_of_numbers_above_0_in_order(values: tuple[float, float, float], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}$"):
        Rate(*values, "how")
