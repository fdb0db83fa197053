"""Rows of what is refused, and the check that nothing has changed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest

import penstock
from penstock import ConfigError
from penstock.errors import PenstockError
from tests.lib.engines import assert_same_state, prepared, state, train


@dataclass(frozen=True)
class Refusal:
    """What is done, and what is said.

    Attributes:
        do: takes what the table's test gives it, such as the model and its handle.
        text: a part of the message, as it stands there.
        error: the class of the error.
        how: what the engine is prepared with, for `prepared`.
    """

    do: Callable[..., Any]
    text: str
    error: type[Exception] = ConfigError
    how: Mapping[str, Any] | None = None


def refused(row: Refusal, *given: Any) -> None:
    """Assert that a row is refused with its text."""
    with pytest.raises(row.error, match=re.escape(row.text)):
        row.do(*given)


def refused_unchanged(row: Refusal, **how: Any) -> None:
    """Assert that an engine refuses a row, holds what it held, and trains on as one that was never asked."""
    choices = {**how, **(row.how or {})}
    model, optimizer = prepared(**choices)
    other_model, other = prepared(**choices)
    train(model, optimizer)
    before = state(model, optimizer)
    refused(row, model, optimizer)
    assert_same_state(state(model, optimizer), before)
    train(other_model, other)
    assert train(model, optimizer, first=1) == train(other_model, other, first=1)
    assert_same_state(state(model, optimizer), state(other_model, other))
    optimizer.close()
    other.close()


#: All that can be asked of a handle; the plan is a value.
METHODS = sorted(name for name in vars(penstock.Optimizer) if not name.startswith("_") and name != "plan")


def call(optimizer: penstock.Optimizer, name: str) -> None:
    """Call a method that is refused before its arguments are looked at, with a number for each that it must have."""
    method = getattr(optimizer, name)
    method(*(1.0 for given in signature(method).parameters.values() if given.default is given.empty))


def said_by(call: Callable[[], object]) -> str:
    """The class of the error that a call is refused with, and its text; empty where it is not refused."""
    try:
        call()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rows(table: Mapping[str, Refusal]) -> Any:
    """Parametrise a test by a table: `@rows(REFUSED)`, with the argument `row`."""
    return pytest.mark.parametrize("row", list(table.values()), ids=list(table))
