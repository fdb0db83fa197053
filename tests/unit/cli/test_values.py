"""Sizes, storages and pairs as they are typed."""

import re

import pytest
from typer import BadParameter

from penstock.cli import values

SIZES = {"0": 0, "4096": 4096, "64mib": 64 * 2**20, "64 MiB": 64 * 2**20, "64MB": 64_000_000, "1.5GiB": 3 * 2**29}
SIZES |= {"2TiB": 2**41, "7B": 7}


def test_sizes() -> None:
    assert {text: values.size(text) for text in SIZES} == SIZES


@pytest.mark.parametrize("text", ["", "MiB", "-1", "4 parsecs", "1e6", "4MiB4", "9" * 41, "\uff11"])
def test_what_is_no_size(text: str) -> None:
    message = f"{text!r} is not a size. Write bytes, or a number with KiB, MiB, GiB or TiB."
    with pytest.raises(BadParameter, match=f"^{re.escape(message)}$"):
        values.size(text)


def test_storages() -> None:
    assert values.storage("cpu") == "cpu"
    assert values.storage(" device = 0.6 , cpu=0.4 ") == {"device": 0.6, "cpu": 0.4}


@pytest.mark.parametrize("text", ["device=half,cpu=0.5", "device=,cpu=1", "device=nan,cpu=1", "cpu=0.5,cpu=0.5", "=1"])
def test_what_is_no_storage(text: str) -> None:
    message = f"{text!r}: write each name once with its value, like device=0.6,cpu=0.4."
    with pytest.raises(BadParameter, match=f"^{re.escape(message)}$"):
        values.storage(text)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(BadParameter, match="is no path"):
        values.path("")
    assert str(values.path("a")) == "a"
