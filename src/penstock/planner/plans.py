"""A plan: what to do on one machine, what it takes, and how long a step is. A value, and a file.

It is an `Answer` that can be written and read, held against a run, and handed to `prepare`.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from torch import nn

from penstock.config import Options, Overlap
from penstock.errors import ConfigError, one_line, shown
from penstock.files import Field, plain
from penstock.planner import plan_files
from penstock.planner.plan_fields import Answer, along
from penstock.planner.table import mesh_in_words, shortfalls_in_words, table

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
_AGAIN = "plan again with penstock plan"
#: What modules around others put into the names of parameters: a model is the same with them.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Plan(Answer):
    """What to do on one machine, what that takes, and how long a step is. Print it for a table.

    `penstock plan` and `penstock.planner.plan` make one, and `prepare(placement="auto", plan=...)` does what it says.
    `Answer` says what the fields are.

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

    def to_json(self) -> str:
        """Write the plan as JSON with sorted keys. `read` gives an equal plan back, to the last bit of each number."""
        return plan_files.to_json(self)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file that `penstock plan` wrote, and that somebody may have edited.

        Arguments:
            path: the file. More than 4 MiB of it are not read.

        Raises:
            ConfigError: it is no such file, or says what no plan can; the message names the file and the key.
        """
        try:
            return plan_files.read(path, cls)
        except Exception as error:  # somebody's file: whatever is made of it
            raise plan_files.naming(path, error) from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Make a plan of what `to_json` wrote.

        Arguments:
            text: the JSON, as from another rank.

        Raises:
            ConfigError: it says what no plan can.
        """
        return plan_files.parse(text.encode(), cls)

    def __str__(self) -> str:
        """Write the table: whether it fits, the step, and what lies where."""
        return table(self)

    def prepare_arguments(self, options: Options | None = None, *, overlap: Overlap = "auto") -> dict[str, Any]:
        """Give the arguments of `prepare` that the plan decides, beside what the user wrote by hand.

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
            sizes: the ranks along each dimension of a mesh (`Answer.sizes`); `None`: they are all along one.

        Raises:
            ConfigError: it names all that differs.
        """
        ranks = along({}, world_size, stage) if sizes is None else sizes
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
    """Tell a model apart by its parameters: their names, shapes and dtypes, and which are trained and which are tied.

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


def _conflict(what: str, given: object, planned: object) -> ConfigError:
    return ConfigError(
        f"{what} is {shown(given)} here and {shown(planned)} in the plan. Leave it out, or {_AGAIN} for it."
    )
