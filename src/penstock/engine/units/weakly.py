"""Hooks of autograd that keep nothing alive: torch does not show collection what a parameter's hook refers to."""

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

Owner = TypeVar("Owner")


def weakly(method: Callable[..., Any], owner: Owner, *values: int) -> Callable[..., None]:
    """Call a bound method with `owner`, the values and what else comes, as long as its object and `owner` are there.

    A parameter would else keep its engine, and the engine that parameter, for ever.
    """
    bound = cast(MethodType, method)
    function, of, reference = bound.__func__, weakref.ref(bound.__self__), weakref.ref(owner)
    del method, bound

    def hook(*arguments: Any) -> None:
        # Both held for the length of the call: collection may come between the question and the use.
        itself, first = of(), reference()
        if itself is not None and first is not None:
            function(itself, first, *values, *arguments)

    return hook
