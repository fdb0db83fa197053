"""Rows that `make test-thorough` runs."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.lib.ranks import PRELOADED, RANK_TIMEOUT, run_ranks

__all__ = ["PRELOADED", "RANK_TIMEOUT", "run_ranks", "sampled", "sampled_rows", "thorough"]


def thorough(*values: Any, id: str | None = None) -> Any:
    """A row of a table that `make test-thorough` runs, and `make test` leaves out: others are much like it."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Every so-many-th row of a long table; `make test-thorough` runs the others."""
    return [value if number % every == 0 else thorough(value) for number, value in enumerate(values)]


def sampled_rows(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The same of rows of several values."""
    return [row if number % every == 0 else thorough(*row) for number, row in enumerate(rows)]
