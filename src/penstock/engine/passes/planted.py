"""Attributes of single objects that stand before those of their class, until they are removed.

Nothing of a class is patched: Python, torch and pickle look at the object first.
"""

from typing import Any, NamedTuple

_MISSING = object()


class _Placed(NamedTuple):
    owner: Any
    name: str
    value: object
    before: object

    def withdraw(self, own: dict[str, Any]) -> None:
        """Leave attributes as they were. What somebody has put in place of ours since stays."""
        if own.get(self.name) is not self.value:
            return
        if self.before is _MISSING:
            del own[self.name]
        else:
            own[self.name] = self.before


class Planted:
    """What was set on objects of the user's, and what was there before."""

    def __init__(self) -> None:
        self._placed: dict[int, list[_Placed]] = {}  # by the identity of the object, which it keeps

    def plant(self, owner: object, name: str, value: object) -> None:
        """Set an attribute of one object."""
        own = vars(owner)
        placed = _Placed(owner, name, value, own.get(name, _MISSING))
        self._placed.setdefault(id(owner), []).append(placed)
        own[name] = value

    def remove(self) -> None:
        """Leave the objects as they were."""
        for of_owner in self._placed.values():
            for placed in reversed(of_owner):
                placed.withdraw(vars(placed.owner))
        self._placed.clear()

    def clean(self, owner: object, state: dict[str, Any]) -> None:
        """Take what is ours out of a copy of an object's attributes."""
        for placed in reversed(self._placed.get(id(owner), [])):
            placed.withdraw(state)
