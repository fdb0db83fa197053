"""A rule of several parts: an optimizer whose parameter groups have arithmetic of their own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from penstock._native import Pool
from penstock.errors import ConfigError
from penstock.rules.rule import Hyper, Rule, Scalars, Segment, StateSpec

Answer = TypeVar("Answer")


class Several:
    """The rule of groups that each say which part is theirs. Updates are asked of the parts.

    Arguments:
        name: the rule's name in reports and checkpoints.
        key: the option of a group that names its part.
        parts: the parts by that name. None has scalars of a parameter's own; a state of a name is the same in all.
    """

    scalar_names: tuple[str, ...] = ()

    def __init__(self, name: str, key: str, parts: Mapping[str, Rule]) -> None:
        assert not any(part.scalar_names for part in parts.values())
        self.name = name
        self._key = key
        self._parts = dict(parts)
        specs: dict[str, StateSpec] = {}
        for part in parts.values():
            for spec in part.states:
                if specs.setdefault(spec.name, spec) != spec:
                    raise ConfigError(
                        f"{name} has a state {spec.name!r} of the parameter's shape in one group and of another "
                        "shape in another. Give it two names, or use Options(state_dtype='fp32')."
                    )
        self.states = tuple(specs.values())

    @property
    def whole(self) -> bool:
        """Whether some part looks at whole parameters."""
        return any(part.whole for part in self._parts.values())

    def part(self, group: Mapping[str, Any]) -> Rule:
        """Return the part of one parameter group; see `Rule.part`.

        Raises:
            ConfigError: the group does not name one.
        """
        named = group.get(self._key)
        if named not in self._parts:
            known = " or ".join(map(repr, self._parts))
            raise ConfigError(f"{self._key}={named!r}: a parameter group of {self.name} says {self._key}={known}.")
        return self._parts[named]

    def state_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a state that some part keeps of such a parameter; a group's part says its own."""
        answers = self._answers(lambda part: part.state_shape(name, shape))
        return next((found for found in answers if found is not None), None)

    def working_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the most bytes that a part needs for a parameter of that shape; a group's part says its own."""
        return max(self._answers(lambda part: part.working_bytes(shape)), default=0)

    def _answers(self, ask: Callable[[Rule], Answer]) -> Iterator[Answer]:
        """Ask those parts that take such a parameter."""
        for part in self._parts.values():
            with suppress(ConfigError):
                yield ask(part)

    def hyper(self, group: Mapping[str, Any], step: int, scalars: Scalars = {}) -> Hyper:  # noqa: B006
        """Read a parameter group by its part; see `Rule.hyper`."""
        return self.part(group).hyper(group, step, scalars)

    def advance(self, hyper: Hyper) -> Scalars:
        """Return nothing: no part has scalars of a parameter's own."""
        del hyper
        return {}

    def advance_group(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the group's part writes into it; see `Rule.advance_group`."""
        return self.part(group).advance_group(group)

    def update(self, segment: Segment, hyper: Hyper, grad_scale: float, pool: Pool | None) -> None:
        """Refuse this: a segment has the states of a part."""
        raise NotImplementedError(f"{self.name} has several parts: update by part(group)")

    def update_many(self, segments: Iterable[tuple[Segment, Hyper]], grad_scale: float, pool: Pool | None) -> None:
        """Refuse this: segments have the states of a part."""
        raise NotImplementedError(f"{self.name} has several parts: update by part(group)")
