"""What a plan says, as values: what to do, what that takes of each memory, how long a step is, and why.

`forecast/plan.py` adds what a plan can do. Everything is checked when it is made, so that a plan that somebody wrote or
edited by hand is refused like an argument that somebody wrote by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, get_args

from penstock.config import Options, Placement
from penstock.errors import ConfigError, shown
from penstock.forecast import values
from penstock.kinds import Overlap, Precision, TierName

#: What a plan has bytes of, by kind: three kinds of state at rest, and activations at their peak.
KINDS = ("params", "grads", "optimizer", "activations")
STAGES = (0, 1, 2, 3)
#: What a plan has ranks along, the outermost first.
DIMENSIONS = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Why:
    """Why one choice is as it is.

    Attributes:
        choice: what was to choose: "recompute".
        chosen: what was chosen, in words.
        next_best: the best of the others, in words.
        cost_s: seconds by which a step would be longer with the next best; `None` where that does not fit.
        words: what decides, in a sentence; empty where the seconds say it all.
    """

    choice: str
    chosen: str
    next_best: str
    cost_s: float | None = None
    words: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        _set(self, **{name: values.words(name, getattr(self, name)) for name in ("choice", "chosen", "next_best")})
        _set(self, words=values.words("words", self.words))
        if self.cost_s is not None:
            _set(self, cost_s=values.number("cost_s", self.cost_s, least=None))


@dataclass(frozen=True)
class WhatIf:
    """What a change of the machine or of the run would bring.

    Attributes:
        name: the change, in words: "a second SSD".
        saved_s: seconds by which a step would be shorter; `None` where the step is another one.
        tokens_share: by what share more tokens would be trained in a second; `None` where `saved_s` says it.
    """

    name: str
    saved_s: float | None = None
    tokens_share: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        _set(self, name=values.words("name", self.name))
        for name in ("saved_s", "tokens_share"):
            if getattr(self, name) is not None:
                _set(self, **{name: values.number(name, getattr(self, name), least=None)})


@dataclass(frozen=True)
class Lack:
    """What does not fit, and the smallest change with which it does.

    Attributes:
        tier: where bytes are missing.
        bytes: how many.
        change: what to do, in words.
    """

    tier: TierName
    bytes: int
    change: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        values.one_of("tier", self.tier, get_args(TierName))
        values.whole("bytes", self.bytes, 1)
        _set(self, change=values.words("change", self.change))


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
        gap: by what share the step is longer than any step can be shown to be at least.
        bytes: bytes of training state at rest, by tier.
        peak_bytes: the most bytes that are there at once, by tier.
        busy_s: how long each resource works, in seconds, by resource.
        stage: what is sharded over ranks, as for `prepare`.
        precision: the compute dtype.
        hosts: how many hosts the ranks are on.
        mesh: the ranks along each dimension that a mesh has ("dp_replicate", "dp_shard", "tp"); empty where all of them
            share one copy of the state, or, in stage 0, have a copy each.
        machine: the name of the machine.
        device: what computes: "cuda"; where it is "cpu", the tiers device and cpu are one memory.
        machine_fingerprint: what tells the machine apart; empty where it was not probed.
        model_fingerprint: what tells the model apart (`penstock.forecast.plan.model_fingerprint`).
        batch: shapes and dtypes of a micro-batch, in words.
        tokens_per_s: how many tokens all ranks train in a second; 0 where the batch has none.
        lower_bound_s: seconds below which no step can be.
        limit_bytes: bytes that there are for this rank, by tier.
        kind_bytes: bytes by kind ("params", "grads" and "optimizer" at rest, "activations" at their peak) and tier.
        waits_s: exposed waits in seconds, by cause, such as "gather layers.3 (upload)".
        what_ifs: what other machines and batches would bring.
        why: why each choice is as it is.
        rounding_notes: choices that may round otherwise than the same run on another placement, in words.
        lacks: what does not fit; empty where all does.

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or two contradict each other.
    """

    placement: Placement
    overlap: Overlap
    options: Options
    recompute: bool
    world_size: int
    fits: bool
    step_s: float
    step_range_s: tuple[float, float]
    bound_by: str
    gap: float
    bytes: Mapping[TierName, int]
    peak_bytes: Mapping[TierName, int]
    busy_s: Mapping[str, float]
    stage: int = 3
    precision: Precision = "bf16"
    hosts: int = 1
    machine: str = ""
    device: str = ""
    machine_fingerprint: Mapping[str, Any] = field(default_factory=dict)
    model_fingerprint: str = ""
    batch: str = ""
    tokens_per_s: float = 0.0
    lower_bound_s: float = 0.0
    limit_bytes: Mapping[TierName, int] = field(default_factory=dict)
    kind_bytes: Mapping[str, Mapping[TierName, int]] = field(default_factory=dict)
    waits_s: Mapping[str, float] = field(default_factory=dict)
    what_ifs: tuple[WhatIf, ...] = ()
    why: tuple[Why, ...] = ()
    rounding_notes: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of range, by name, and keep each in one way."""
        self._check_choices()
        for name in ("step_s", "gap", "tokens_per_s", "lower_bound_s"):
            _set(self, **{name: values.number(name, getattr(self, name))})
        for name in ("bytes", "peak_bytes", "limit_bytes"):
            _set(self, **{name: values.by_tier(name, getattr(self, name))})
        for name in ("busy_s", "waits_s"):
            _set(self, **{name: values.amounts(name, getattr(self, name))})
        for name in ("bound_by", "machine", "device", "model_fingerprint", "batch"):
            _set(self, **{name: values.words(name, getattr(self, name))})
        _set(self, kind_bytes=values.by_kind("kind_bytes", self.kind_bytes, KINDS))
        _set(self, machine_fingerprint=values.plain("machine_fingerprint", self.machine_fingerprint))
        for name, kind in (("what_ifs", WhatIf), ("why", Why), ("lacks", Lack), ("rounding_notes", str)):
            _set(self, **{name: values.items(name, getattr(self, name), kind)})
        _set(self, rounding_notes=tuple(values.words("rounding_notes", note) for note in self.rounding_notes))
        self._check_range()
        self._check_fits()
        self._check_mesh()

    def _check_choices(self) -> None:
        """Check what `prepare` will be given, and for how many ranks."""
        _set(self, placement=values.placement(self.placement))
        if not isinstance(self.options, Options):
            raise values.refuse("options", self.options, "Options")
        values.one_of("overlap", self.overlap, get_args(Overlap))
        values.one_of("precision", self.precision, get_args(Precision))
        values.one_of("stage", self.stage, STAGES)
        for name in ("world_size", "hosts"):
            values.whole(name, getattr(self, name), 1)
        for name in ("recompute", "fits"):
            values.true_or_false(name, getattr(self, name))
        if self.world_size % self.hosts:
            raise ConfigError(
                f"world_size={shown(self.world_size)} and hosts={shown(self.hosts)} contradict each "
                "other: use as many ranks on each host."
            )

    def _check_range(self) -> None:
        """Check that the step is between the seconds that are named for it."""
        given: Any = self.step_range_s
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise values.refuse("step_range_s", given, "two numbers")
        low, high = (values.number("step_range_s", item) for item in given)
        if not low <= self.step_s <= high:
            raise ConfigError(
                f"step_range_s=({low:g}, {high:g}) and step_s={self.step_s:g} contradict each other: the step is "
                "between the two."
            )
        _set(self, step_range_s=(low, high))

    def _check_mesh(self) -> None:
        """Check that the ranks of the mesh are those that there are."""
        given = values.plain("mesh", self.mesh)
        for name, size in given.items():
            values.one_of("mesh, a dimension", name, DIMENSIONS)
            values.whole(f"mesh[{name!r}]", size, 1)
        _set(self, mesh={name: given.get(name, 1) for name in DIMENSIONS} if given else {})
        if given and prod(self.mesh.values()) != self.world_size:
            raise ConfigError(
                f"world_size={shown(self.world_size)} and mesh={shown(dict(self.mesh))} contradict each "
                "other: use as many ranks as the product of its sizes."
            )

    @property
    def sizes(self) -> Mapping[str, int]:
        """The ranks along each dimension of a mesh, also where they are all along one."""
        return along(self.mesh, self.world_size, self.stage)

    def _check_fits(self) -> None:
        """Check that something is missing just where the plan does not fit."""
        if self.fits == bool(self.lacks):
            raise ConfigError(
                f"fits={self.fits} and {len(self.lacks)} lacks contradict each other: a plan that fits lacks nothing, "
                "and one that does not says what it lacks."
            )


def along(mesh: Mapping[str, int], world_size: int, stage: int) -> Mapping[str, int]:
    """Give the ranks along each dimension: those of a mesh, or where there is none, all along one.

    Example:
        >>> along({}, 8, stage=3)
        {'dp_replicate': 1, 'dp_shard': 8, 'tp': 1}
    """
    if mesh:
        return mesh
    return dict.fromkeys(DIMENSIONS, 1) | {"dp_shard" if stage else "dp_replicate": world_size}


def _set(value: Answer | Why | WhatIf | Lack, **checked: Any) -> None:
    """Put checked values in the place of those that were given."""
    for name, item in checked.items():
        object.__setattr__(value, name, item)
