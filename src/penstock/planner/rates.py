"""The figures of a machine: their names, units and meanings, and how people write and read them.

All are in SI units: bytes, bytes/s, FLOP/s, seconds. `RATES` is what errors, the command and the docs read.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import quantiles
from typing import Annotated, Literal, NamedTuple

from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, check_fields
from penstock.planner.formatting import decimal, seconds, size

Unit = Literal["bytes", "bytes/s", "FLOP/s", "s", "count"]


class About(NamedTuple):
    """What a figure is.

    Attributes:
        unit: of its value.
        meaning: what it is, in one line.
    """

    unit: Unit
    meaning: str


#: Every figure there is, by name.
RATES: Mapping[str, About] = {
    "devices": About("count", "accelerators of a host"),
    "device_memory": About("bytes", "memory of one device"),
    "host_memory": About("bytes", "memory of the host, for all its ranks together"),
    "pinnable_memory": About("bytes", "memory of the host that can be registered for copies of devices"),
    "host_threads": About("count", "cores of the host that updates may use"),
    "flops_float32": About("FLOP/s", "achieved by a device's matrix products in float32"),
    "flops_bfloat16": About("FLOP/s", "achieved by a device's matrix products in bfloat16"),
    "flops_float16": About("FLOP/s", "achieved by a device's matrix products in float16"),
    "device_bandwidth": About("bytes/s", "of elementwise operations on a device, read and written"),
    "device_update": About("bytes/s", "of an update on a device, read and written"),
    "op_seconds": About("s", "least time that an operation takes a device"),
    "op_host_seconds": About("s", "time of the host, in Python and autograd too, for an operation of a model"),
    "op_threads_seconds": About("s", "time that the threads of a cpu take to begin and end an operation together"),
    "job_seconds": About("s", "overhead of a job on a stream"),
    "wake_seconds": About("s", "from the end of what a thread of the host sleeps for until the thread goes on"),
    "h2d": About("bytes/s", "from pinned memory of the host to a device, alone"),
    "d2h": About("bytes/s", "from a device to pinned memory of the host, alone"),
    "h2d_pageable": About("bytes/s", "from memory of the host that is not pinned to a device"),
    "d2h_pageable": About("bytes/s", "from a device to memory of the host that is not pinned"),
    "duplex": About("bytes/s", "of both ways between the host and a device together, at the same time"),
    "host_bandwidth": About("bytes/s", "of the host's DRAM, reads and writes together; copies and updates share it"),
    "update": About("bytes/s", "of the host's update, read and written; of rules that have no figure of their own"),
    "update_adamw": About("bytes/s", "of the host's update by AdamW, read and written"),
    "update_adam": About("bytes/s", "of the host's update by Adam, read and written"),
    "update_sgd": About("bytes/s", "of the host's update by SGD, read and written"),
    "update_adagrad": About("bytes/s", "of the host's update by Adagrad, read and written"),
    "update_lion": About("bytes/s", "of the host's update by Lion, read and written"),
    "folders": About("count", "folders for files, each on a disk of its own"),
    "disk_free": About("bytes", "free in one folder"),
    "disk_endurance": About("bytes", "that may be written to the disk of one folder in its life"),
    "disk_read": About("bytes/s", "read from one folder, a record at a time"),
    "disk_write": About("bytes/s", "written into one folder, a record at a time"),
    "disk_mixed": About("bytes/s", "read and written together in one folder, at the same time"),
    "disk_cores": About("bytes/s", "that all cores could move from and to files: checksums, system calls"),
    "disk_seconds": About("s", "time until the first byte of a record is there"),
    "link_bandwidth": About("bytes/s", "of a collective between a host's devices: (n-1)/n of its buffer over time"),
    "link_seconds": About("s", "latency of a collective between a host's devices"),
    "net_bandwidth": About("bytes/s", "of a collective between hosts, for each host: (n-1)/n of its buffer over time"),
    "net_seconds": About("s", "latency of a collective between hosts"),
}

#: What a number is multiplied with, by what is written behind it. Letters count: GB is 10**9, GiB is 2**30.
_BYTES = (
    {"B": 1.0}
    | {f"{prefix}B": 1000.0**power for power, prefix in enumerate("kMGTP", start=1)}
    | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}
)
_SI: Mapping[Unit, str] = {"bytes/s": "B/s", "FLOP/s": "FLOP/s"}
UNITS: Mapping[Unit, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{name}/s": factor for name, factor in _BYTES.items()},
    "FLOP/s": {f"{prefix}FLOP/s": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
    "count": {},
}
#: How a figure that somebody wrote down without more is said to have come about.
STATED = "stated"

_MOST_CHARS = 80
_NUMBER = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?)\s*(.*?)\s*", re.DOTALL)


def _above_0(field: Field) -> float:
    value = field.number()
    if value <= 0:
        raise field.refuse("a number above 0")
    return value


@dataclass(frozen=True)
class Rate:
    """A figure of a machine: its value, how far it spreads, and where it is from.

    Arguments:
        value: above 0, in the figure's unit (`RATES`).
        low: the least that was seen, at most `value`.
        high: the most that was seen, at least `value`.
        how: how it was measured, or its source.

    Raises:
        ConfigError: a number is no finite number above 0, or `low <= value <= high` does not hold.

    Example:
        >>> Rate(7e9, 6.8e9, 7.1e9, "read 256 MiB in records of 4 MiB, 5 times").value
        7000000000.0
    """

    value: Annotated[float, _above_0]
    low: Annotated[float, _above_0]
    high: Annotated[float, _above_0]
    how: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.low <= self.value <= self.high:
            raise ConfigError(f"low {self.low:g}, value {self.value:g}, high {self.high:g} are not in this order")

    @classmethod
    def stated(cls, value: float, how: str = STATED) -> "Rate":
        """Make a figure of a number that somebody gives, without a spread."""
        return cls(value, value, value, how)

    @classmethod
    def of(cls, samples: Sequence[float], how: str) -> "Rate":
        """Make the figure of one sample or more: their median and quartiles."""
        low, value, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [*samples] * 3
        return cls(value, low, high, how)

    def scaled(self, factor: float, told: str = "") -> "Rate":
        """Return the figure times a factor, with some words more."""
        return Rate(self.value * factor, self.low * factor, self.high * factor, self.how + told)


def check_name(name: object) -> str:
    """Check that something is the name of a figure.

    Raises:
        ConfigError: there is none of that name. The message has the nearest one, and all.
    """
    if not isinstance(name, str) or name not in RATES:
        raise unknown("figure", name, [*RATES])
    return name


def unknown(what: str, given: object, names: Sequence[str]) -> ConfigError:
    """Make the error of a name that nothing has, with the nearest one and all; the caller raises it."""
    is_short = isinstance(given, str) and len(given) <= 99
    near = difflib.get_close_matches(str(given).lower(), names, n=1, cutoff=0.4) if is_short else []
    hint = f" Did you mean {near[0]}?" if near else ""
    return ConfigError(f"There is no {what} {shown(given)}.{hint} There are: {', '.join(names)}.")


def check_value(name: str, value: object) -> float:
    """Check the value of a figure: a finite number above 0, and a whole one if it counts something.

    Raises:
        ConfigError: it is not.
    """
    about, field = RATES[name], Field(None, name, value)
    found = _above_0(field)
    if about.unit == "count" and found != int(found):
        raise field.refuse(f"a whole number: it counts {about.meaning}")
    return found


def parse_rate(text: str) -> tuple[str, float]:
    """Read what people write to change a figure: its name, `=`, a number, and its unit unless it is an SI unit.

    Units are exact: `GB` is 10**9 bytes, `GiB` is 2**30. Bits are refused.

    Arguments:
        text: such as `disk_read=7GB/s`, `device_memory=24GiB`, `flops_bfloat16=165TFLOP/s` or `disk_seconds=80us`.

    Returns:
        The figure's name, and its value in the unit of `RATES`.

    Raises:
        ConfigError: there is no such figure, or what follows is no value of it.

    Example:
        >>> parse_rate("disk_read=7GB/s")
        ('disk_read', 7000000000.0)
    """
    name, equals, written = text.partition("=")
    if not equals:
        raise ConfigError(f"{shown(text)} is no figure with its value. Write it as in disk_read=7GB/s.")
    name = check_name(name.strip())
    unit = RATES[name].unit
    factors = {"": 1.0, **UNITS[unit]}
    match = _NUMBER.fullmatch(written) if len(written) <= _MOST_CHARS else None
    try:
        if match is None:
            raise ConfigError("no number is there")
        if match[2] not in factors:
            raise ConfigError(f"{one_line(match[2], _MOST_CHARS)} is no unit of {name}, which is in {unit}")
        # In decimals, so that 80us is 8e-05.
        value = check_value(name, float(Decimal(match[1]) * Decimal(repr(factors[match[2]]))))
    except ConfigError as error:
        why = str(error).rstrip(".")
        units = f" with {', '.join(UNITS[unit])} or nothing behind it; bits are not read" if UNITS[unit] else ""
        raise ConfigError(f"{name}={one_line(written, _MOST_CHARS)}: {why}. Write a number{units}.") from error
    return name, value


def write_value(name: str, value: float) -> str:
    """Write a figure's value as people read it, and as `parse_rate` reads it, to three digits.

    Example:
        >>> write_value("disk_read", 7e9)
        '7.00 GB/s'
    """
    unit = RATES[name].unit
    if unit == "count":
        return f"{value:.0f}"
    written = size(round(value)) if unit == "bytes" else seconds(value) if unit == "s" else decimal(value, _SI[unit])
    return written.replace(",", "")
