"""What a plan says, as values: what to do, what that takes of each memory, how long a step is, and why.

`planner/plans.py` adds what a plan can do. Everything is checked when it is made, so that a plan that somebody wrote or
edited by hand is refused like an argument that somebody wrote by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, get_args

from penstock.config import Options, Overlap, Placement, Precision, Tier, TierName, parse_tier
from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, check_fields, plain, reader

Kind = Literal["params", "grads", "optimizer", "activations"]
Dimension = Literal["dp_replicate", "dp_shard", "tp"]
#: What a plan has bytes of, by kind: three kinds of state at rest, and activations at their peak.
KINDS = get_args(Kind)
STAGES = (0, 1, 2, 3)
#: What a plan has ranks along, the outermost first.
DIMENSIONS = get_args(Dimension)
_MOST_CHARS = 300


def line(field: Field) -> str:
    """Read a text, on one line that steers no terminal. Its own words stay as they are."""
    value = field.string()
    text = one_line(value, max(1, len(value)))
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _amount(field: Field) -> float:
    return field.number(least=0) + 0.0  # no -0.0, which is shown as "-0"


def _by_name(field: Field) -> dict[str, float]:
    """Read amounts by name, in order of their names."""
    return dict(sorted((line(field.inside("a name", name)), _amount(item)) for name, item in field.entries()))


def _placement(field: Field) -> Placement:
    """Read a placement, and write it in the one way in which plans keep it: tiers by their own names, folders as texts.

    Its homes are to the bit those of the placement that was given.
    """
    given = field.value
    if not isinstance(given, Placement):
        field.only([member.name for member in fields(Placement)])
        given = Placement(**field.mapping())
    homes: dict[str, Any] = {}
    for kind in ("params", "grads", "optimizer"):
        found = given.home(kind)
        fractions = {tier.value: found[tier] for tier in Tier if tier in found}
        homes[kind] = next(iter(fractions)) if list(fractions.values()) == [1.0] else fractions
    named = given.activations
    activations: Any = None if named is None else parse_tier(named, what="activations").value
    folders = [str(folder) for folder in given.nvme_folders()]
    return Placement(
        **homes,
        activations=activations,
        nvme_path=None if given.nvme_path is None else folders[0] if len(folders) == 1 else tuple(folders),
    )


_Line = Annotated[str, line]
_Amount = Annotated[float, _amount]
_Count = Annotated[int, partial(Field.integer, least=1)]
_ByName = Annotated[Mapping[str, float], _by_name]
_ByTier = Mapping[TierName, int]


@dataclass(frozen=True)
class Reason:
    """Why one choice is as it is.

    Attributes:
        choice: what was to choose: "recompute".
        chosen: what was chosen, in words.
        next_best: the best of the others, in words.
        cost_s: seconds by which a step would be longer with the next best; `None` where that does not fit.
        words: what decides, in a sentence; empty where the seconds say it all.
    """

    choice: _Line
    chosen: _Line
    next_best: _Line
    cost_s: float | None = None
    words: _Line = ""

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        check_fields(self)


@dataclass(frozen=True)
class WhatIf:
    """What a change of the machine or of the run would bring.

    Attributes:
        name: the change, in words: "a second SSD".
        saved_s: seconds by which a step would be shorter; `None` where the step is another one.
        tokens_share: by what share more tokens would be trained in a second; `None` where `saved_s` says it.
    """

    name: _Line
    saved_s: float | None = None
    tokens_share: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        check_fields(self)


@dataclass(frozen=True)
class Shortfall:
    """What does not fit, and the smallest change with which it does.

    Attributes:
        tier: where bytes are missing.
        bytes: how many.
        change: what to do, in words.
    """

    tier: TierName
    bytes: _Count
    change: _Line = ""

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        check_fields(self)


@dataclass(frozen=True)
class Answer:
    """What to do on one machine, and what that takes. Figures are those of one rank and one step.

    Attributes:
        placement: where each kind of state lives.
        overlap: when updates run.
        options: sizes and policies.
        recompute: whether backward computes again what forward did not keep; the model has to be told.
        world_size: how many ranks there are.
        fits: whether every memory has room.
        step_s: seconds of a step; 0 where it was not found.
        step_range_s: the seconds between which the step is, as sure as the machine's figures are.
        bound_by: the resource with the most busy time.
        bytes: bytes of training state at rest, by tier.
        peak_bytes: the most bytes that are there at once, by tier.
        busy_s: how long each resource works, in seconds, by resource.
        written_bytes: bytes written in one step, by tier; what wears a disk.
        stage: what is sharded over ranks, as for `prepare`.
        precision: the compute dtype.
        hosts: how many hosts the ranks are on.
        mesh: the ranks along each dimension that a mesh has ("dp_replicate", "dp_shard", "tp"); empty where all of them
            share one copy of the state, or, in stage 0, have a copy each.
        machine: the name of the machine.
        device: what computes: "cuda"; where it is "cpu", the tiers device and cpu are one memory.
        machine_fingerprint: what tells the machine apart; empty where it was not probed.
        model_fingerprint: what tells the model apart (`penstock.planner.plans.model_fingerprint`).
        batch: shapes and dtypes of a micro-batch, in words.
        tokens_per_s: how many tokens all ranks train in a second; 0 where the batch has none.
        limit_bytes: bytes that there are for this rank, by tier.
        kind_bytes: bytes by kind ("params", "grads" and "optimizer" at rest, "activations" at their peak) and tier.
        waits_s: exposed waits in seconds, by cause, such as "gather layers.3 (upload)".
        what_ifs: what other machines and batches would bring.
        why: why each choice is as it is.
        rounding_notes: choices that may round otherwise than the same run on another placement, in words.
        lacks: what does not fit; empty where all does.
        disk_endurance_bytes: bytes that may be written to one disk of the nvme tier in its life; 0 if unknown.
        unified_memory: True if device and host are one memory, so that offload to the host moves nothing.

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or two contradict each other.
    """

    placement: Annotated[Placement, _placement]
    overlap: Overlap
    options: Options
    recompute: bool
    world_size: _Count
    fits: bool
    step_s: _Amount
    step_range_s: tuple[_Amount, _Amount]
    bound_by: _Line
    bytes: _ByTier
    peak_bytes: _ByTier
    busy_s: _ByName
    written_bytes: _ByTier = field(default_factory=dict)
    stage: Annotated[int, partial(Field.one_of, choices=STAGES)] = 3
    precision: Precision = "bf16"
    hosts: _Count = 1
    machine: _Line = ""
    device: _Line = ""
    machine_fingerprint: Annotated[Mapping[str, Any], plain] = field(default_factory=dict)
    model_fingerprint: _Line = ""
    batch: _Line = ""
    tokens_per_s: _Amount = 0.0
    limit_bytes: _ByTier = field(default_factory=dict)
    kind_bytes: Annotated[Mapping[str, _ByTier], reader(Mapping[Kind, _ByTier])] = field(default_factory=dict)
    waits_s: _ByName = field(default_factory=dict)
    what_ifs: tuple[WhatIf, ...] = ()
    why: tuple[Reason, ...] = ()
    rounding_notes: tuple[_Line, ...] = ()
    lacks: tuple[Shortfall, ...] = ()
    mesh: Annotated[Mapping[str, int], reader(Mapping[Dimension, _Count])] = field(default_factory=dict)
    disk_endurance_bytes: _Amount = 0.0
    unified_memory: bool = False

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of range, by name, and keep each in one way."""
        check_fields(self)
        if self.mesh:
            object.__setattr__(self, "mesh", {name: self.mesh.get(name, 1) for name in DIMENSIONS})
        low, high = self.step_range_s
        for holds, what, rule in (
            (
                self.world_size % self.hosts == 0,
                f"world_size={shown(self.world_size)} and hosts={shown(self.hosts)}",
                "use as many ranks on each host",
            ),
            (
                low <= self.step_s <= high,
                f"step_range_s=({low:g}, {high:g}) and step_s={self.step_s:g}",
                "the step is between the two",
            ),
            (
                self.fits != bool(self.lacks),
                f"fits={self.fits} and {len(self.lacks)} lacks",
                "a plan that fits lacks nothing, and one that does not says what it lacks",
            ),
            (
                not self.mesh or prod(self.mesh.values()) == self.world_size,
                f"world_size={shown(self.world_size)} and mesh={shown(dict(self.mesh))}",
                "use as many ranks as the product of its sizes",
            ),
        ):
            if not holds:
                raise ConfigError(f"{what} contradict each other: {rule}.")

    @property
    def sizes(self) -> Mapping[str, int]:
        """The ranks along each dimension of a mesh, also where they are all along one."""
        return along(self.mesh, self.world_size, self.stage)


def along(mesh: Mapping[str, int], world_size: int, stage: int) -> Mapping[str, int]:
    """Give the ranks along each dimension: those of a mesh, or where there is none, all along one.

    Example:
        >>> along({}, 8, stage=3)
        {'dp_replicate': 1, 'dp_shard': 8, 'tp': 1}
    """
    if mesh:
        return mesh
    return dict.fromkeys(DIMENSIONS, 1) | {"dp_shard" if stage else "dp_replicate": world_size}
