"""Two plans side by side: what differs first, and then what does not."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

from penstock.config import Options
from penstock.planner.formatting import aligned, seconds, share, size
from penstock.planner.plan_fields import Answer
from penstock.planner.table import (
    STATE,
    activations_in_words,
    columns,
    home_in_words,
    mesh_in_words,
    peaks,
    shortfalls_in_words,
    updates_in_words,
    waits_by_verb,
)


class Row(NamedTuple):
    """One thing that two plans say.

    Attributes:
        name: what it is.
        first: what the first plan says, in words.
        second: what the second one says.
        change: by what share the second is more than the first; empty where that means nothing.
    """

    name: str
    first: str
    second: str
    change: str = ""


def compare(first: Answer, second: Answer, *, names: tuple[str, str] = ("first", "second")) -> str:
    """Write two plans side by side: what differs, and below it what is the same.

    Figures that are equal in three digits are the same.

    Arguments:
        first: one plan.
        second: the other one; changes are those from the first to it.
        names: what to call them, such as their files.
    """
    rows = list(_rows(first, second))
    different = [[f"  {row.name}", row.first, row.second, row.change] for row in rows if row.first != row.second]
    same = [[f"  {row.name}", row.first] for row in rows if row.first == row.second]
    lines = aligned([["differs", *names, ""], *different]) if different else ["nothing differs"]
    return "\n".join([*lines, *(["the same", *aligned(same)] if same else [])])


def _rows(first: Answer, second: Answer) -> Iterator[Row]:
    """List what both say: what comes out, what to do, what that takes, and what it is for."""
    yield Row("fits", _fits(first), _fits(second))
    step_s = max(first.step_s, second.step_s)
    yield from _times({"step": first.step_s}, {"step": second.step_s}, step_s)
    before, after = first.tokens_per_s, second.tokens_per_s
    yield Row("tokens/s", f"{before:,.0f}", f"{after:,.0f}", _change(before, after))
    yield from _texts(_said(first), _said(second))
    yield from _times(_busy(first), _busy(second), step_s)
    yield from _times(_waits(first), _waits(second), step_s)


def _busy(plan: Answer) -> dict[str, float]:
    return {f"busy: {name}": busy for name, busy in plan.busy_s.items()}


def _waits(plan: Answer) -> dict[str, float]:
    return {f"waits: {verb}": waited for verb, waited in waits_by_verb(plan)}


def _fits(plan: Answer) -> str:
    return "yes" if plan.fits else f"no: {shortfalls_in_words(plan)}"


def _said(plan: Answer) -> dict[str, str]:
    """Say in words what a plan does and takes, and what it is for."""
    said = {"bound by": plan.bound_by}
    said |= {name: home_in_words(plan, kind) for kind, name in STATE.items()}
    said |= {"activations": activations_in_words(plan), "updates": updates_in_words(plan)}
    said |= {
        f"Options({member.name})": str(getattr(plan.options, member.name))
        for member in fields(Options)
        if getattr(plan.options, member.name) != member.default and member.name != "streamed_updates"
    }
    for name, tiers in columns(plan):
        said[f"at rest: {name}"] = size(sum(plan.bytes.get(tier, 0) for tier in tiers))
    said |= {f"peak / limit: {name}": peak for name, peak in peaks(plan).items()}
    said |= {"precision": plan.precision, "stage": str(plan.stage), "ranks": str(plan.world_size)}
    said |= {"mesh": mesh_in_words(plan.sizes)} if plan.mesh else {}
    said |= {"hosts": str(plan.hosts), "machine": plan.machine or "-", "batch": plan.batch or "-"}
    return said | {"model": plan.model_fingerprint or "-"}


def _texts(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Row]:
    for name in dict.fromkeys([*first, *second]):
        yield Row(name, first.get(name, "-"), second.get(name, "-"))


def _times(first: Mapping[str, float], second: Mapping[str, float], step_s: float) -> Iterator[Row]:
    """List seconds by name, those that take the longest in either plan first."""
    names = sorted({*first, *second}, key=lambda name: (-max(first.get(name, 0.0), second.get(name, 0.0)), name))
    for name in names:
        before, after = first.get(name, 0.0), second.get(name, 0.0)
        yield Row(name, seconds(before, beside=step_s), seconds(after, beside=step_s), _change(before, after))


def _change(before: float, after: float) -> str:
    return share(after / before - 1) if before else ""
