"""Values that a plan is made of, checked: each function gives back what it was given, as plans keep it."""

import json
import math
from collections.abc import Mapping
from typing import Any

from penstock.config import Placement
from penstock.errors import ConfigError, one_line, shown
from penstock.kinds import Tier, TierName, parse_tier

_MOST_CHARS = 300
_KINDS: Mapping[type, str] = {dict: "an object", str: "a text"}


def refuse(what: str, value: object, use: str) -> ConfigError:
    """Make the error of a value that cannot be; the caller raises it."""
    return ConfigError(f"{what}={shown(value)}: use {use}.")


def whole(what: str, value: object, least: int = 0) -> int:
    """Check a whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(what, value, f"a whole number, {least} or more")
    return value


def number(what: str, value: object, least: float | None = 0) -> float:
    """Check a finite number that is not below the least one."""
    wanted = "a finite number" if least is None else f"a finite number, {least:g} or more"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(what, value, wanted)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or (least is not None and found < least):
        raise refuse(what, value, wanted)
    return found + 0.0  # no -0.0, which is shown as "-0"


def true_or_false(what: str, value: object) -> bool:
    """Check what is true or false."""
    if not isinstance(value, bool):
        raise refuse(what, value, "True or False")
    return value


def one_of(what: str, value: object, choices: tuple[Any, ...]) -> Any:
    """Check that a value is one of a few."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in choices:
        raise refuse(what, value, f"one of {', '.join(map(repr, choices))}")
    return value


def words(what: str, value: object) -> str:
    """Check a text, and put it on one line that steers no terminal. Its own words stay as they are."""
    if not isinstance(value, str):
        raise refuse(what, value, "a text")
    line = one_line(value, max(1, len(value)))
    return line if len(line) <= _MOST_CHARS else f"{line[: _MOST_CHARS - 3]}..."


def amounts(what: str, value: object) -> dict[str, float]:
    """Check numbers by name, none of them negative. They are in order of their names."""
    named = {words(f"{what}, a name", name): item for name, item in _mapping(what, value).items()}
    return {name: number(f"{what}[{name!r}]", named[name]) for name in sorted(named)}


def by_tier(what: str, value: object) -> dict[TierName, int]:
    """Check bytes by tier. They are in order of the tiers, the fastest first."""
    given = _mapping(what, value)
    tiers: dict[str, Any] = {tier.value: given[tier.value] for tier in Tier if tier.value in given}
    for name in given:
        if name not in tiers:
            raise refuse(f"{what}, a tier", name, "one of 'device', 'cpu', 'nvme'")
    return {name: whole(f"{what}[{name!r}]", nbytes) for name, nbytes in tiers.items()}  # type: ignore[misc]


def by_kind(what: str, value: object, kinds: tuple[str, ...]) -> dict[str, dict[TierName, int]]:
    """Check bytes by kind and tier. They are in the order in which the kinds are named."""
    given = _mapping(what, value)
    for name in given:
        one_of(f"{what}, a kind", name, kinds)
    return {kind: by_tier(f"{what}[{kind!r}]", given[kind]) for kind in kinds if kind in given}


def plain(what: str, value: object) -> dict[str, Any]:
    """Check a mapping that JSON can hold, and give it as JSON gives it back."""
    try:
        text = json.dumps(dict(_mapping(what, value)), sort_keys=True, allow_nan=False)
        found: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(what, value, "a mapping that JSON can hold") from error
    return found


def items(what: str, value: object, kind: type) -> tuple[Any, ...]:
    """Check a list of values of one type."""
    if not isinstance(value, list | tuple):
        raise refuse(what, value, "a list")
    for position, item in enumerate(value):
        if not isinstance(item, kind):
            raise refuse(f"{what}[{position}]", item, _KINDS.get(kind, f"a {kind.__name__}"))
    return tuple(value)


def placement(value: object) -> Placement:
    """Write a placement in the one way in which plans keep it: tiers by their own names, folders as texts.

    Its homes are to the bit those of the placement that was given.
    """
    if not isinstance(value, Placement):
        raise refuse("placement", value, "a Placement")
    homes: dict[str, Any] = {}
    for kind in ("params", "grads", "optimizer"):
        found = value.home(kind)
        fractions = {tier.value: found[tier] for tier in Tier if tier in found}
        homes[kind] = next(iter(fractions)) if list(fractions.values()) == [1.0] else fractions
    named = value.activations
    activations: Any = None if named is None else parse_tier(named, what="activations").value
    folders = [str(folder) for folder in value.nvme_folders()]
    return Placement(
        **homes,
        activations=activations,
        nvme_path=None if value.nvme_path is None else folders[0] if len(folders) == 1 else tuple(folders),
    )


def _mapping(what: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise refuse(what, value, "a mapping")
    return value
