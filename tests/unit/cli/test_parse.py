import re

import pytest

from penstock.cli.parse import parse_betas, parse_home, parse_share, parse_size_bytes
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("64mib", 64 * 2**20),
        ("64 MiB", 64 * 2**20),
        ("64MB", 64_000_000),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text, option="--tile-bytes") == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "4 parsecs", "1e6", "4MiB4"])
def test_what_is_no_size(text: str) -> None:
    message = f"--tile-bytes {text!r} is not a size. Write bytes, or a number with KiB, MiB, GiB or TiB."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        parse_size_bytes(text, option="--tile-bytes")


def test_a_part_of_a_byte() -> None:
    with pytest.raises(
        ConfigError, match=r"^--live-bytes '0.0001KiB' is 0.1024 bytes. Write a whole number of bytes.$"
    ):
        parse_size_bytes("0.0001KiB", option="--live-bytes")


@pytest.mark.parametrize(
    ("text", "home"),
    [
        ("cpu", "cpu"),
        ("device=0.6,cpu=0.4", {"device": 0.6, "cpu": 0.4}),
        (" device = 0.5 , nvme = 0.5 ", {"device": 0.5, "nvme": 0.5}),
    ],
)
def test_homes(text: str, home: str | dict[str, float]) -> None:
    assert parse_home(text, option="--optimizer") == home


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device=half,cpu=0.5", "'half' is not a number. Write it like device=0.6,cpu=0.4."),
        ("device=,cpu=1", "'' is not a number."),
        ("device=nan,cpu=1", "'nan' is not a number."),
        ("cpu=0.5,cpu=0.5", "names the tier 'cpu' twice. Give each tier one fraction."),
    ],
)
def test_what_is_no_home(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_home(text, option="--optimizer")


def test_shares() -> None:
    assert parse_share(" 0.4", option="--streamed-updates") == 0.4
    assert parse_share("auto", option="--streamed-updates") == "auto"
    with pytest.raises(ConfigError, match=re.escape("--streamed-updates 'half': 'half' is not a number.")):
        parse_share("half", option="--streamed-updates")


def test_betas() -> None:
    assert parse_betas("0.9, 0.95", option="--betas") == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9", "--betas '0.9' is not two numbers. Write them like 0.9,0.95."),
        ("0.9,0.95,1", "is not two numbers."),
        ("0.9,x", "--betas '0.9,x': 'x' is not a number. Write it like 0.9,0.95."),
    ],
)
def test_what_are_no_betas(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_betas(text, option="--betas")
