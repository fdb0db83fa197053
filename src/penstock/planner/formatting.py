"""Numbers as people read them, three digits and a unit, and rows as columns."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence

_GAP = "    "
_WIDTH = 80  # of a terminal
_BYTE_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_DECIMAL_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_LEAST_BESIDE = 0.095  # of a unit: shown as 0.10
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def size(nbytes: int) -> str:
    """Write bytes in a unit that is fit for them, with three digits."""
    unit, scale = byte_unit(nbytes)
    return f"{digits(nbytes / scale) if scale > 1 else nbytes} {unit}"


def decimal(value: float, unit: str = "B") -> str:
    """Write an amount with a decimal prefix, as makers of disks do, with three digits."""
    prefix, scale = next((each for each in _DECIMAL_PREFIXES if value >= each[1]), _DECIMAL_PREFIXES[-1])
    return f"{digits(value / scale)} {prefix}{unit}"


def seconds(value: float, *, beside: float = 0.0) -> str:
    """Write seconds in a unit that is fit for them, with three digits.

    Arguments:
        value: the seconds.
        beside: seconds that they are read beside, whose unit is taken where they are not too few for it.
    """
    shares = beside and (not value or value >= _LEAST_BESIDE * time_unit(beside)[1])
    unit, scale = time_unit(beside if shares else value)
    return f"{digits(value / scale)} {unit}"


def signed(value: float, *, beside: float = 0.0) -> str:
    """Write a difference of seconds, with its sign."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value), beside=beside)}"


def share(value: float) -> str:
    """Write a difference as a share, in percent with its sign."""
    text = f"{value:+,.0%}".replace("%", " %")
    return "0 %" if text in ("+0 %", "-0 %") else text


def fraction(value: float) -> str:
    """Write a tier's fraction of a kind with two digits, which never hide that there is something, or not all."""
    if 0 < value < 0.01:
        return "<.01"
    return ">.99" if 0.99 < value < 1 else f"{value:.2f}"


def byte_unit(nbytes: int) -> tuple[str, int]:
    """Choose the unit for a number of bytes, and return its bytes."""
    return next((each for each in _BYTE_UNITS if nbytes >= each[1]), _BYTE_UNITS[-1])


def time_unit(value: float) -> tuple[str, float]:
    """Choose the unit for a number of seconds, and return its seconds."""
    if value == 0:
        return _TIME_UNITS[0]
    return next((each for each in _TIME_UNITS if value >= each[1]), _TIME_UNITS[-1])


def digits(value: float) -> str:
    """Write a number that is not negative with three digits, or with all that stand before the point."""
    if value == 0:
        return "0"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns. The last cell of a row may be as long as it likes."""
    widths: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        for number, cell in enumerate(row[:-1]):
            widths[number] = max(widths[number], len(cell))
    return [_GAP.join([*(cell.ljust(widths[n]) for n, cell in enumerate(row[:-1])), row[-1]]).rstrip() for row in rows]


def wrapped(line: str, indent: int) -> list[str]:
    """Break a line where a terminal is too narrow for it; lines after the first are indented. An empty one is none."""
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
