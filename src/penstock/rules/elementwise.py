"""What all rules answer alike that update each element by itself."""

from collections.abc import Mapping
from typing import Any, Self

from penstock.rules.rule import Rule


class Elementwise:
    """The part of a `Rule` that is the same for every element-wise one."""

    @property
    def whole(self) -> bool:
        """No: elements are updated each by itself, wherever a parameter is cut."""
        return False

    def part(self, group: Mapping[str, Any]) -> Self:
        """Return this rule, which is every group's."""
        del group
        return self

    def state_shape(self: Rule, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the parameter's: there is a value for each element; see `Rule.state_shape`."""
        return shape if name in (spec.name for spec in self.states) else None

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return nothing: the arithmetic writes into no group; see `Rule.advance_group`."""
        del group
        return {}

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return 0: temporaries are of pieces; see `Rule.working_bytes`."""
        del shape
        return 0
