"""What people type, read as values. A mistake is a `ConfigError` that names the option."""

import math
import re
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError

_UNIT_BYTES = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
)
_MOST_DIGITS = 40
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
#: No file, memory or count of anything is larger, and every reader of a number takes it.
_MOST = 1 << 62
_MOST_STEPS = (1 << 31) - 1


def parse_path(text: str, *, option: str) -> Path:
    """Read a path.

    Raises:
        ConfigError: it is empty, which would be the folder that one is in, or no path at all.
    """
    if not text or "\0" in text:
        raise ConfigError(f"{option} {text!r} is no path. Name a file or a folder.")
    return Path(text)


def parse_size_bytes(text: str, *, option: str) -> int:
    """Read a size: a number of bytes, or a number with a suffix (`64MiB` is 2**26, `64MB` is 64 million).

    Raises:
        ConfigError: not a size, or not a whole number of bytes.

    Example:
        >>> parse_size_bytes("64MiB", option="--tile-bytes")
        67108864
    """
    match = _SIZE.fullmatch(text)
    unit = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{option} {text!r} is not a size. Write bytes, or a number with KiB, MiB, GiB or TiB.")
    if len(match[1]) > _MOST_DIGITS:
        raise ConfigError(f"{option} has a number of {len(match[1]):,} digits. Write bytes, or a number with GiB.")
    size = int(match[1]) * unit if match[1].isdigit() else float(match[1]) * unit
    if size != int(size):
        raise ConfigError(f"{option} {text!r} is {size:g} bytes. Write a whole number of bytes.")
    if size > _MOST:
        raise ConfigError(f"{option} {text!r} is more than there is. Write a smaller size.")
    return int(size)


def parse_home(text: str, *, option: str) -> str | dict[str, float]:
    """Read the home of a kind of state: a tier (`cpu`), or tiers with their fractions (`device=0.6,cpu=0.4`).

    Only the shape of the text is checked here: which tiers there are is the library's to say.

    Raises:
        ConfigError: a fraction that is not a number, or a tier named twice.

    Example:
        >>> parse_home("device=0.6,cpu=0.4", option="--optimizer")
        {'device': 0.6, 'cpu': 0.4}
    """
    if "=" not in text:
        return text.strip()
    fractions: dict[str, float] = {}
    for part in text.split(","):
        tier, _, fraction_text = (piece.strip() for piece in part.partition("="))
        if tier in fractions:
            raise ConfigError(f"{option} {text!r} names the tier {tier!r} twice. Give each tier one fraction.")
        fractions[tier] = _number(fraction_text, option=option, text=text, example="device=0.6,cpu=0.4")
    return fractions


def parse_share(text: str, *, option: str) -> float | Literal["auto"]:
    """Read a share, such as `0.4`, or `auto`.

    Raises:
        ConfigError: neither; which numbers are shares is the library's to say.
    """
    return "auto" if text.strip() == "auto" else _number(text.strip(), option=option, text=text, example="0.4 or auto")


def parse_betas(text: str, *, option: str) -> tuple[float, float]:
    """Read the two decay rates of AdamW's moments, such as `0.9,0.95`.

    Raises:
        ConfigError: not two numbers.
    """
    parts = text.split(",")
    if len(parts) != 2:
        raise ConfigError(f"{option} {text!r} is not two numbers. Write them like 0.9,0.95.")
    first, second = (_number(part.strip(), option=option, text=text, example="0.9,0.95") for part in parts)
    return first, second


def parse_warmup(text: str, *, option: str) -> float:
    """Read a warmup: steps, or below 1 their share of all.

    Raises:
        ConfigError: no such number.

    Example:
        >>> parse_warmup("0.03", option="--warmup"), parse_warmup("100", option="--warmup")
        (0.03, 100.0)
    """
    number = _number(text.strip(), option=option, text=text, example="100 or 0.03")
    if number < 0 or number > _MOST_STEPS or (number >= 1 and number != int(number)):
        raise ConfigError(f"{option} {text!r}: use whole steps, or a share of all from 0 to below 1.")
    return number


def _number(part: str, *, option: str, text: str, example: str) -> float:
    """Read a part of a text as a finite number, or refuse it with an example of how to write it."""
    try:
        number = float(part)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{option} {text!r}: {part!r} is not a number. Write it like {example}.")
    return number
