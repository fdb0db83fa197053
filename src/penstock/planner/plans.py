"""A plan: what to do on one machine, what it takes, and how long a step is. A value, a file, and a table.

A file is JSON that a person can read and edit, and that somebody else may have written. Its keys are the fields of
`Plan`. Every value is checked when a plan is made, and a placement and options are rebuilt by their own constructors,
so that a file can ask for nothing that an argument could not.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from torch import nn

from penstock.config import Options, Overlap, Placement, Precision, Tier, TierName, parse_tier
from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, check_fields, plain, read_file, read_record, reader, without_removed
from penstock.planner.formatting import (
    aligned,
    byte_unit,
    decimal,
    digits,
    fraction,
    seconds,
    share,
    signed,
    size,
    time_unit,
    wrapped,
)

Kind = Literal["params", "grads", "optimizer", "activations"]
Dimension = Literal["dp_replicate", "dp_shard", "tp"]
#: What a plan has bytes of, by kind: three kinds of state at rest, and activations at their peak.
KINDS = get_args(Kind)
#: What a plan has ranks along, the outermost first.
DIMENSIONS = get_args(Dimension)
#: Options by which a step gets longer or shorter, or takes more or less: a plan is for these values of them.
PLANNED_OPTIONS = (
    "prefetch_bytes",
    "live_bytes",
    "persistent_bytes",
    "tile_bytes",
    "pinned_bytes",
    "update_threads",
    "streamed_updates",
    "io_queue_depth",
    "state_dtype",
    "gather_format",
    "reduce_format",
    "secondary_shard",
)
APlan = TypeVar("APlan", bound="Plan")

FILE_KIND, VERSION, MOST_BYTES = "plan", 1, 4 << 20
#: Keys that files of 0.2 have, and nothing reads any more.
_DROPPED = ("gap", "lower_bound_s")
_AGAIN = "plan again with penstock plan"
_MOST_CHARS = 300
#: What modules around others put into the names of parameters: a model is the same with them.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


# ----------------------------------------------------------------------------------------------------------------------
# The value
# ----------------------------------------------------------------------------------------------------------------------


def _line(field: Field) -> str:
    """Read a text, on one line that steers no terminal. Its own words stay as they are."""
    value = field.string()
    text = one_line(value, max(1, len(value)))
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _amount(field: Field) -> float:
    return field.number(least=0) + 0.0  # no -0.0, which is shown as "-0"


def _by_name(field: Field) -> dict[str, float]:
    """Read amounts by name, in order of their names."""
    return dict(sorted((_line(field.inside("a name", name)), _amount(item)) for name, item in field.entries()))


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


_Line = Annotated[str, _line]
_Amount = Annotated[float, _amount]
_Count = Annotated[int, partial(Field.integer, least=1)]
_ByName = Annotated[Mapping[str, float], _by_name]
_ByTier = Mapping[TierName, int]


class _Checked:
    """A dataclass whose fields are checked when it is made."""

    def __post_init__(self) -> None:
        """Refuse what is no such value."""
        check_fields(self)


@dataclass(frozen=True)
class Reason(_Checked):
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


@dataclass(frozen=True)
class WhatIf(_Checked):
    """What a change of the machine or of the run would bring.

    Attributes:
        name: the change, in words: "a second SSD".
        saved_s: seconds by which a step would be shorter; `None` where the step is another one.
        tokens_share: by what share more tokens would be trained in a second; `None` where `saved_s` says it.
    """

    name: _Line
    saved_s: float | None = None
    tokens_share: float | None = None


@dataclass(frozen=True)
class Shortfall(_Checked):
    """What does not fit, and the smallest change with which it does.

    Attributes:
        tier: where bytes are missing.
        bytes: how many.
        change: what to do, in words.
    """

    tier: TierName
    bytes: _Count
    change: _Line = ""


@dataclass(frozen=True)
class Plan(_Checked):
    """What to do on one machine, what that takes, and how long a step is. Print it for a table.

    `penstock plan` and `penstock.planner.plan` make one, and `prepare(placement="auto", plan=...)` does what it says.
    Figures are those of one rank and one step.

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
        mesh: the ranks along each dimension that a mesh has ("dp_replicate", "dp_shard", "tp"); empty where all of them
            share one copy of the state, or, in stage 0, have a copy each.
        disk_endurance_bytes: bytes that may be written to one disk of the nvme tier in its life; 0 if unknown.
        unified_memory: True if device and host are one memory, so that offload to the host moves nothing.

    Raises:
        ConfigError: a value is of the wrong type or out of its range, or two contradict each other.

    Example:
        >>> from penstock import Placement
        >>> plan = Plan(
        ...     placement=Placement(optimizer="cpu"), overlap="auto", options=Options(),
        ...     recompute=False, world_size=1, fits=True, step_s=0.5, step_range_s=(0.4, 0.6),
        ...     bound_by="host update", bytes={"device": 2 << 30, "cpu": 5 << 30},
        ...     peak_bytes={"device": 3 << 30, "cpu": 5 << 30}, busy_s={"host update": 0.4},
        ... )
        >>> plan.prepare_arguments()["placement"].optimizer
        'cpu'
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
    stage: Annotated[int, partial(Field.one_of, choices=(0, 1, 2, 3))] = 3
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
        super().__post_init__()
        if self.mesh:
            object.__setattr__(self, "mesh", {name: self.mesh.get(name, 1) for name in DIMENSIONS})
        (low, high), ranks = self.step_range_s, f"world_size={shown(self.world_size)}"
        if self.world_size % self.hosts:
            raise _contradiction(ranks, f"hosts={shown(self.hosts)}", "use as many ranks on each host")
        if not low <= self.step_s <= high:
            first = f"step_range_s=({low:g}, {high:g})"
            raise _contradiction(first, f"step_s={self.step_s:g}", "the step is between the two")
        if self.fits == bool(self.lacks):
            rule = "a plan that fits lacks nothing, and one that does not says what it lacks"
            raise _contradiction(f"fits={self.fits}", f"{len(self.lacks)} lacks", rule)
        if self.mesh and prod(self.mesh.values()) != self.world_size:
            mesh = f"mesh={shown(dict(self.mesh))}"
            raise _contradiction(ranks, mesh, "use as many ranks as the product of its sizes")

    @property
    def sizes(self) -> Mapping[str, int]:
        """The ranks along each dimension of a mesh, also where they are all along one."""
        return self.mesh or _along_one(self.world_size, self.stage)

    def to_json(self) -> str:
        """Write the plan as JSON with sorted keys. `read` gives an equal plan back, to the last bit of each number."""
        content = {"penstock": FILE_KIND, "version": VERSION, **asdict(self)}
        return json.dumps(content, sort_keys=True, indent=2, allow_nan=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file that `penstock plan` wrote, and that somebody may have edited.

        Arguments:
            path: the file. More than 4 MiB of it are not read.

        Raises:
            ConfigError: it is no such file, or says what no plan can; the message names the file and the key.
        """
        return read_file(path, MOST_BYTES, partial(_parse, cls))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a plan of what `to_json` wrote.

        Arguments:
            text: the JSON, as from another rank.

        Raises:
            ConfigError: it says what no plan can.
        """
        return _parse(cls, text.encode())

    def __str__(self) -> str:
        """Write the table: whether it fits, the step, and what lies where."""
        return _table(self)

    def prepare_arguments(self, options: Options | None = None, *, overlap: Overlap = "auto") -> dict[str, Any]:
        """Return the arguments of `prepare` that the plan decides, beside what the user wrote by hand.

        Options that change neither the length of a step nor what it takes are the user's where these say something,
        else the plan's. All others are the plan's; the user may say the same, or nothing. "auto" says nothing, and a
        share of updates that the device does has no effect where that is a cpu.

        Arguments:
            options: the user's options; `None` says nothing.
            overlap: the user's; `"auto"` says nothing.

        Returns:
            `placement`, `overlap` and `options`.

        Raises:
            ConfigError: the user asks for something else than the plan, or the plan does not fit.
        """
        if not self.fits:
            raise ConfigError(f"The plan does not fit: {shortfalls_in_words(self)} Change that, and {_AGAIN}.")
        if overlap not in ("auto", self.overlap):
            raise _conflict("overlap", overlap, self.overlap)
        return {
            "placement": self.placement,
            "overlap": self.overlap,
            "options": self.options if options is None else self._merged(options),
        }

    def _merged(self, options: Options) -> Options:
        """Put what the plan decides into the user's options."""
        unsaid, chosen = Options(), {}
        for name in (member.name for member in fields(Options)):
            value, planned = getattr(options, name), getattr(self.options, name)
            if name == "streamed_updates" and self.device == "cpu":
                continue  # it has no effect there
            if value == getattr(unsaid, name) or (name == "streamed_updates" and value == "auto"):
                chosen[name] = planned
            elif name in PLANNED_OPTIONS and value != planned:
                raise _conflict(f"Options({name})", value, planned)
        return replace(options, **chosen)

    def check_for(
        self,
        model: nn.Module,
        machine_fingerprint: Mapping[str, Any] | None,
        world_size: int,
        stage: int,
        precision: str,
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Refuse a run that the plan is not for.

        Arguments:
            model: the model, before `prepare`; it may be on the meta device.
            machine_fingerprint: what tells this machine apart; `None` where nobody asked it. What only one of the two
                fingerprints says is not compared, so a plan of a machine that was not probed is for any.
            world_size: how many ranks there are.
            stage: as for `prepare`.
            precision: as for `prepare`.
            sizes: the ranks along each dimension of a mesh (`Plan.sizes`); `None`: they are all along one.

        Raises:
            ConfigError: it names all that differs.
        """
        ranks = _along_one(world_size, stage) if sizes is None else sizes
        if (world_size, stage) != (self.world_size, self.stage):
            ranks = self.sizes  # what differs is said by itself
        differs = [
            f"{what} {planned}, this run has {there}"
            for what, planned, there in (
                ("world size", self.world_size, world_size),
                ("stage", self.stage, stage),
                ("a mesh of", mesh_in_words(self.sizes), mesh_in_words(ranks)),
                ("precision", self.precision, precision),
            )
            if planned != there
        ]
        own = model_fingerprint(model)
        if self.model_fingerprint not in ("", own):
            differs.append(f"a model of {self.model_fingerprint}, this one has {own}")
        there = plain(Field(None, "machine_fingerprint", machine_fingerprint or {}))
        for name, planned in self.machine_fingerprint.items():
            if name in there and there[name] != planned:
                what = f"a machine whose {one_line(name)} is {shown(planned)}"
                differs.append(f"{what}, here it is {shown(there[name])}")
        if differs:
            raise ConfigError(f"The plan is for {'; for '.join(differs)}: {_AGAIN}.")


def placeholders(folders: int) -> list[str]:
    """Name folders of a machine that has none by name: of one that somebody does not have."""
    return [f"nvme{number}" for number in range(folders)]


def model_fingerprint(model: nn.Module) -> str:
    """Describe a model by its parameters: their names, shapes and dtypes, and which are trained and which are tied.

    Their values and their device do not count, nor do wrappers that recompute or compile.

    Arguments:
        model: the model, before `prepare`; it may be on the meta device.

    Returns:
        A line of words and a digest; the words are for people who compare two of them.

    Example:
        >>> model_fingerprint(nn.Linear(2, 3))[:31]
        '2 tensors, 9 parameters, 9 trai'
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names.setdefault(parameter, []).append(name)
    digest = hashlib.sha256()
    lines = [
        f"{sorted(tied)} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n"
        for parameter, tied in names.items()
    ]
    for line in sorted(lines):
        digest.update(line.encode("utf-8", "backslashreplace"))
    total = sum(parameter.numel() for parameter in names)
    trained = sum(parameter.numel() for parameter in names if parameter.requires_grad)
    return f"{len(names)} tensors, {total} parameters, {trained} trained, digest {digest.hexdigest()[:32]}"


def _contradiction(first: str, second: str, rule: str) -> ConfigError:
    return ConfigError(f"{first} and {second} contradict each other: {rule}.")


def _conflict(what: str, given: object, planned: object) -> ConfigError:
    return ConfigError(
        f"{what} is {shown(given)} here and {shown(planned)} in the plan. Leave it out, or {_AGAIN} for it."
    )


def _along_one(world_size: int, stage: int) -> Mapping[str, int]:
    """Return the ranks along each dimension, where all are along one."""
    return dict.fromkeys(DIMENSIONS, 1) | {"dp_shard" if stage else "dp_replicate": world_size}


def _parse(kind: type[APlan], raw: bytes) -> APlan:
    """Make a plan of the content of its file."""
    content = without_removed(read_record(raw, FILE_KIND, VERSION))
    return reader(kind)(Field(None, "", {key: value for key, value in content.items() if key not in _DROPPED}))


# ----------------------------------------------------------------------------------------------------------------------
# In words
# ----------------------------------------------------------------------------------------------------------------------

#: Above which share a measured time is said to differ from the predicted one.
DIFFERS = 0.15
#: Below which share of a step a resource's difference is not worth a line.
MATTERS = 0.01
STEP = "step"
#: The kinds of state as a placement calls them, and as people do.
STATE: Mapping[str, str] = {"params": "params", "grads": "gradients", "optimizer": "optimizer"}
_WAITS_SHOWN = 3
_DAY_S = 86400
_LIVES = (("years", 8760), ("days", 24), ("hours", 1))


def explain(plan: Plan) -> str:
    """Write for each choice of a plan what the next best one would have cost, and why."""
    if not plan.why:
        return "Nothing to choose: the placement was given, or all of it fits on the device."
    lines = []
    for why in plan.why:
        cost = "does not fit" if why.cost_s is None else signed(why.cost_s, beside=plan.step_s)
        words = f" ({why.words})" if why.words else ""
        lines += wrapped(f"{why.choice}: {why.chosen}; next best: {why.next_best}, {cost}{words}", 2)
    return "\n".join(lines)


def block(plan: Plan, measured: Mapping[str, float] | None = None) -> str:
    """Write what a run will do, or has done: the plan's step and resources, and beside them what was measured.

    Arguments:
        plan: the plan.
        measured: seconds of a step (`"step"`), and of a step those of each resource, by its name in `busy_s`; `None`
            before they are known.

    Returns:
        Lines. Where measured, the last ones name the step and each resource that differs by more than 15 %; of
        resources only those whose difference is more than 1 % of the step.
    """
    predicted = {STEP: plan.step_s, **dict(_largest(plan.busy_s))}
    state = "; ".join(f"{name} {_home_in_words(plan, kind)}" for kind, name in STATE.items())
    lines = [
        f"plan: step {seconds(plan.step_s)}{_tokens(plan)}, bound by: {plan.bound_by}",
        f"  {state}",
        f"  activations {_activations_in_words(plan)}; {_updates_in_words(plan)}",
    ]
    if measured is None:
        rows = [[f"  {name}", seconds(value, beside=plan.step_s)] for name, value in predicted.items()]
        return "\n".join([*lines, *aligned(rows)])
    rows, differs = [["", "predicted", "measured", ""]], []
    for name in dict.fromkeys([*predicted, *sorted(measured)]):
        planned, found = predicted.get(name), measured.get(name)
        cells = ["-" if value is None else seconds(value, beside=plan.step_s) for value in (planned, found)]
        rows.append([f"  {name}", *cells, share(found / planned - 1) if planned and found is not None else ""])
        if found is not None:
            differs += _difference(name, planned or 0.0, found, max(plan.step_s, measured.get(STEP, 0.0)))
    return "\n".join([*lines, *aligned(rows), *differs])


def compare(first: Plan, second: Plan, *, names: tuple[str, str] = ("first", "second")) -> str:
    """Write the rows of two plans' tables: those that differ, both of each, and below them those that are the same.

    Figures that are equal in three digits are the same.

    Arguments:
        first: one plan.
        second: the other one.
        names: what to call them, such as their files.
    """
    one, two = _compared(first), _compared(second)
    differ, same = [*wrapped(f"differs: {names[0]} -> {names[1]}", 4)], list[list[str]]()
    for name in dict.fromkeys([*one, *two]):
        before, after = one.get(name, "-"), two.get(name, "-")
        if before == after:
            same.append([f"  {name}", before])
        else:
            differ += wrapped(f"  {name}: {before} -> {after}", 6)
    below = [line for row in aligned(same) for line in wrapped(row, 4)]
    return "\n".join([*(differ if len(same) < len({*one, *two}) else ["nothing differs"]), "the same", *below])


def mesh_in_words(sizes: Mapping[str, int]) -> str:
    """Write the ranks along each dimension of a mesh, but for those of one rank.

    Example:
        >>> mesh_in_words({"dp_replicate": 16, "dp_shard": 8, "tp": 1})
        'dp_replicate 16 x dp_shard 8'
    """
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


def shortfalls_in_words(plan: Plan) -> str:
    """Write what is missing for a plan, on which tier, and what to do: a sentence or two for each tier."""
    said = []
    for lack in plan.lacks:
        where = next(name for name, tiers in _columns(plan).items() if lack.tier in tiers)
        place = where if where == "nvme" else f"the {where}"
        change = lack.change.rstrip(".")
        said.append(f"{size(lack.bytes)} ({lack.bytes:,} bytes) too few on {place}.")
        said += [f"Smallest change: {change}."] if change else []
    return " ".join(said)


def _table(plan: Plan) -> str:
    """Write a plan as a table of 80 columns."""
    lines = aligned([["", *_columns(plan)], *_rows(plan)])
    indent = len(lines[0]) - len(lines[0].lstrip())
    said = [" | ".join(_what_if(change, plan.step_s).replace(" ", "\xa0") for change in plan.what_ifs)]
    said += [f"may round otherwise: {note}" for note in plan.rounding_notes]
    parts = [wrapped(line, 14) for line in _head(plan)]
    parts += [wrapped(line, indent) for line in lines] + [wrapped(line, 2) for line in said]
    return "\n".join(line for part in parts for line in part).replace("\xa0", " ")


def _rows(plan: Plan) -> list[list[str]]:
    """Write the rows of the table: what lies where by columns of memory, then those of one text."""
    columns, rows = _columns(plan), []
    for kind, name in STATE.items():
        home, row = _home(plan, kind), [name]
        for column, tiers in columns.items():
            there = _sum(plan.kind_bytes.get(kind, {}), tiers)
            cell = fraction(home[column]) if column in home else "-"
            row.append(f"{cell} {size(there)}" if there else cell)
        rows.append(row)
    rows.append(["activations", *_activations(plan)])
    rows.append(["peak / limit", *(_peak(plan, tiers) for tiers in columns.values())])
    return rows + [[name, text] for name, text in _wide_rows(plan).items() if text]


def _compared(plan: Plan) -> dict[str, str]:
    """Write in words what comes out of a plan, what to do, what that takes and what it is for."""
    options = {member.name: getattr(plan.options, member.name) for member in fields(Options)}
    return {
        "fits": "yes" if plan.fits else f"no: {shortfalls_in_words(plan)}",
        "step": _step(plan),
        "tiers": " | ".join(_columns(plan)),
        **{name: " | ".join(cells) for name, *cells in _rows(plan)},
        **{f"busy: {name}": seconds(value) for name, value in _largest(plan.busy_s)},
        **{f"Options({name})": str(value) for name, value in options.items() if value != getattr(Options(), name)},
        "model": plan.model_fingerprint or "-",
    }


def _columns(plan: Plan) -> Mapping[str, tuple[TierName, ...]]:
    """Name the columns of memory, and the tiers of each: device and host may be one memory."""
    if plan.device == "cpu" or plan.unified_memory:
        return {"host": ("device", "cpu"), "nvme": ("nvme",)}
    return {"device": ("device",), "host": ("cpu",), "nvme": ("nvme",)}


def _head(plan: Plan) -> list[str]:
    step = f"step {_step(plan)}" if plan.step_s else ""
    if plan.fits:
        return [f"fits: yes     {step}"]
    return [f"fits: no      {shortfalls_in_words(plan)}", *([f"if it did: {step}"] if step else [])]


def _step(plan: Plan) -> str:
    """Write the seconds of a step, their range, and tokens a second."""
    low, high = (digits(value / time_unit(plan.step_s)[1]) for value in plan.step_range_s)
    return f"{seconds(plan.step_s)} ({low}-{high}){_tokens(plan)}"


def _wide_rows(plan: Plan) -> dict[str, str]:
    """Write the rows that are one text over all columns, by their names; an empty text is no row."""
    by_verb: defaultdict[str, float] = defaultdict(float)
    for cause, waited in plan.waits_s.items():
        by_verb[cause.split()[0] if cause.strip() else "other"] += waited
    waits = _largest(by_verb)
    rest = ("others", sum(waited for _, waited in waits[_WAITS_SHOWN:]))
    shown = [(verb, waited) for verb, waited in (*waits[:_WAITS_SHOWN], rest) if waited]
    said = ", ".join(f"{verb} {seconds(waited, beside=plan.step_s)}" for verb, waited in shown)
    run = [plan.machine, plan.precision, f"stage {plan.stage}", plan.batch]
    if plan.world_size > 1:
        hosts = "" if plan.hosts == 1 else f" on {plan.hosts} hosts"
        copies = f", {mesh_in_words(plan.sizes)}" if plan.mesh else ""
        run.append(f"one of {plan.world_size} ranks{hosts}{copies}")
    return {
        "bound by": plan.bound_by,
        "updates": _updates_in_words(plan),
        "waits exposed": said or ("none" if waits else ""),
        "written": _written(plan),
        "memory": "device and host are one: offload to the host moves nothing" if plan.unified_memory else "",
        "planned for": ", ".join(word for word in run if word),
    }


def _written(plan: Plan) -> str:
    """Write what a step writes to each disk, what that comes to in a day, and how long a drive lasts."""
    ranks = plan.world_size // plan.hosts  # which share the disks of their host
    nbytes = plan.written_bytes.get("nvme", 0) * ranks / max(1, len(plan.placement.nvme_folders()))
    if not nbytes:
        return ""
    said = f"nvme {decimal(nbytes)} a step"
    said += f", {decimal(nbytes * _DAY_S / plan.step_s)} a day" if plan.step_s else ""
    if plan.disk_endurance_bytes:
        steps = plan.disk_endurance_bytes / nbytes
        hours = steps * plan.step_s / 3600
        unit, scale = next(((unit, scale) for unit, scale in _LIVES if hours >= scale), _LIVES[-1])
        said += f"; a drive of {plan.disk_endurance_bytes / 1e12:,.0f} TBW lasts {steps:,.0f} steps"
        said += f", {digits(hours / scale)} {unit}" if hours else ""
    return said


def _home(plan: Plan, kind: str) -> dict[str, float]:
    """Return the fraction of a kind of state that each column has, of those that have any."""
    home = {tier.value: part for tier, part in plan.placement.home(kind).items()}
    summed = {name: sum(home.get(tier, 0.0) for tier in tiers) for name, tiers in _columns(plan).items()}
    # Fractions sum to 1 to within 1e-6: what is all but that is all.
    return {name: 1.0 if part > 1 - 1e-6 else part for name, part in summed.items() if part}


def _home_in_words(plan: Plan, kind: str) -> str:
    """Write where a kind of state lives: "0.31 device + 0.69 host"."""
    home = _home(plan, kind)
    return " + ".join(name if part == 1 else f"{fraction(part)} {name}" for name, part in home.items())


def _activations_in_words(plan: Plan) -> str:
    """Write where activations go, and what is done to them: "device (recomputed)"."""
    tier = plan.placement.activations or "device"
    where = next(name for name, tiers in _columns(plan).items() if tier in tiers)
    return f"{where} (recomputed)" if plan.recompute else where


def _activations(plan: Plan) -> list[str]:
    """Write where activations are, and behind the last of it what is done to them."""
    nbytes = plan.kind_bytes.get("activations", {})
    if not any(nbytes.values()):
        return [_activations_in_words(plan)]
    cells = [size(found) if (found := _sum(nbytes, tiers)) else "-" for tiers in _columns(plan).values()]
    while cells[-1] == "-":
        cells.pop()
    return [*cells[:-1], f"{cells[-1]} (recomputed)" if plan.recompute else cells[-1]]


def _updates_in_words(plan: Plan) -> str:
    """Write when updates run, and what part of the host's is done on the device."""
    streamed = plan.options.streamed_updates
    if streamed == 0:
        return f"overlap {plan.overlap}"
    part = "a measured share" if streamed == "auto" else fraction(float(streamed))
    return f"overlap {plan.overlap}, {part} of the host's on the device"


def _what_if(change: WhatIf, step_s: float) -> str:
    """Write what a change would bring: "a second SSD -0.20 s"."""
    saved = "" if change.saved_s is None else f" {signed(-change.saved_s, beside=step_s)}"
    return f"{change.name}{saved}" + ("" if change.tokens_share is None else f" {share(change.tokens_share)} tokens/s")


def _difference(name: str, planned: float, found: float, step_s: float) -> list[str]:
    """Name what was measured, if it differs by more than it should. What the plan does not name it takes for idle."""
    if abs(found - planned) <= max(DIFFERS * planned, 0.0 if name == STEP else MATTERS * step_s):
        return []
    than = f" ({share(found / planned - 1)})" if planned else ""
    both = [seconds(value, beside=step_s) for value in (found, planned)]
    return [f"differs: {name}: {both[0]} measured, {both[1]} predicted{than}"]


def _peak(plan: Plan, tiers: Iterable[TierName]) -> str:
    """Write the most bytes that are there at once, beside those that there are."""
    peak = _sum(plan.peak_bytes, tiers)
    # The limit of one memory is not the sum of what each of its two names says.
    limits = [plan.limit_bytes[tier] for tier in tiers if tier in plan.limit_bytes]
    if not limits:
        return size(peak) if peak else "-"
    unit, scale = byte_unit(max(limits))
    said = digits(peak / scale) if byte_unit(peak)[0] == unit else size(peak)
    return f"{said} / {size(max(limits))}"


def _sum(by_tier: Mapping[TierName, int], tiers: Iterable[TierName]) -> int:
    return sum(by_tier.get(tier, 0) for tier in tiers)


def _tokens(plan: Plan) -> str:
    return f", {plan.tokens_per_s:,.0f} tokens/s" if plan.tokens_per_s else ""


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
