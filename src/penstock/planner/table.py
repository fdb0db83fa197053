"""A plan in words: the table of a plan, why it is as it is, and what was predicted beside what was measured."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.config import TierName
from penstock.planner.formatting import aligned, byte_unit, digits, fraction, seconds, share, signed, size, time_unit
from penstock.planner.plan_fields import Answer, Shortfall, WhatIf

#: Above which share a measured time is said to differ from the predicted one.
DIFFERS = 0.15
#: Below which share of a step a resource's difference is not worth a line.
MATTERS = 0.01
STEP = "step"
#: The kinds of state as a placement calls them, and as people do.
STATE: Mapping[str, str] = {"params": "params", "grads": "gradients", "optimizer": "optimizer"}

_WAITS_SHOWN = 3

#: A column of the table, and the tiers that it is of: of a cpu, device and host are one memory.
Column = tuple[str, tuple[TierName, ...]]


def table(answer: Answer, *, run: str = "") -> str:
    """Write a plan as a table.

    Arguments:
        answer: the plan.
        run: the command that does what it says; empty for none.
    """
    rows = [["", *(name for name, _ in columns(answer))], *state_rows(answer), ["activations", *_activations(answer)]]
    rows += [["peak / limit", *peaks(answer).values()], *_wide_rows(answer)]
    lines = [*_head(answer), *aligned(rows), *_tail(answer)]
    if answer.fits:
        lines += [f"run: {run}"] if run else []
    lines += [f"may round otherwise: {note}" for note in answer.rounding_notes]
    return "\n".join(line.rstrip() for line in lines)


def explain(answer: Answer) -> str:
    """Write for each choice of a plan what the next best one would have cost, and why."""
    if not answer.why:
        return "There was nothing to choose: the placement was given, or all of it fits where compute is."
    rows = [["choice", "chosen", "next best", "would cost"]]
    for reason in answer.why:
        cost = "does not fit" if reason.cost_s is None else signed(reason.cost_s, beside=answer.step_s)
        rows.append([reason.choice, reason.chosen, reason.next_best, cost])
    head, *lines = aligned(rows)
    explained = [f"{line}\n  {why.words}" if why.words else line for line, why in zip(lines, answer.why, strict=True)]
    return "\n".join([head, *explained])


def block(answer: Answer, measured: Mapping[str, float] | None = None) -> str:
    """Write what a run will do, or has done: the plan's step and resources, and beside them what was measured.

    Arguments:
        answer: the plan.
        measured: seconds of a step (`"step"`), and of a step those of each resource, by its name in `busy_s`; `None`
            before they are known.

    Returns:
        Lines. Where measured, the last ones name the step and each resource that differs by more than 15 %; of
        resources only those whose difference is more than 1 % of the step.
    """
    predicted = {STEP: answer.step_s, **dict(_largest(answer.busy_s))}
    head = f"plan: step {seconds(answer.step_s)}{_tokens(answer)}, bound by: {answer.bound_by}"
    lines = [head, *(f"  {line}" for line in _choices(answer))]
    if measured is None:
        return "\n".join(
            [*lines, *aligned([[f"  {name}", _beside(value, answer)] for name, value in predicted.items()])]
        )
    rows = [["", "predicted", "measured", ""]]
    for name in dict.fromkeys([*predicted, *sorted(measured)]):
        planned, found = predicted.get(name), measured.get(name)
        change = share(found / planned - 1) if planned and found is not None else ""
        rows.append([f"  {name}", _beside(planned, answer), _beside(found, answer), change])
    return "\n".join([*lines, *aligned(rows), *_differences(predicted, measured)])


def shortfalls_in_words(answer: Answer) -> str:
    """Say what is missing for a plan, on which tier, and what to do: a sentence or two for each tier."""
    return " ".join(_lack(answer, lack) for lack in answer.lacks)


def columns(answer: Answer) -> list[Column]:
    """Name the columns of memory, and the tiers of each."""
    if answer.device == "cpu":
        return [("host", ("device", "cpu")), ("nvme", ("nvme",))]
    return [("device", ("device",)), ("host", ("cpu",)), ("nvme", ("nvme",))]


def home_of(answer: Answer, kind: str) -> dict[str, float]:
    """Give the fraction of a kind of state that each column has, of those that have any."""
    home = {tier.value: part for tier, part in answer.placement.home(kind).items()}
    summed = {name: sum(home.get(tier, 0.0) for tier in tiers) for name, tiers in columns(answer)}
    # Fractions sum to 1 to within 1e-6: what is all but that is all.
    return {name: 1.0 if part > 1 - 1e-6 else part for name, part in summed.items() if part}


def home_in_words(answer: Answer, kind: str) -> str:
    """Say where a kind of state lives: "0.31 device + 0.69 host"."""
    home = home_of(answer, kind)
    return " + ".join(name if part == 1 else f"{fraction(part)} {name}" for name, part in home.items())


def state_rows(answer: Answer) -> list[list[str]]:
    """Write the rows of the three kinds of state: each column's fraction, and the bytes where they are known."""
    rows = []
    for kind, name in STATE.items():
        home, nbytes = home_of(answer, kind), answer.kind_bytes.get(kind, {})
        row = [name]
        for column, tiers in columns(answer):
            there = bytes_in(nbytes, tiers)
            cell = fraction(home[column]) if column in home else "-"
            row.append(f"{cell} {size(there)}" if there else cell)
        rows.append(row)
    return rows


def peaks(answer: Answer) -> dict[str, str]:
    """Write for each column the most bytes that are there at once, beside those that there are."""
    return {name: _peak(answer, tiers) for name, tiers in columns(answer)}


def bytes_in(by_tier: Mapping[TierName, int], tiers: Iterable[TierName]) -> int:
    """Add up the bytes of some tiers."""
    return sum(by_tier.get(tier, 0) for tier in tiers)


def activations_in_words(answer: Answer) -> str:
    """Say where activations go, and what is done to them: "device (recomputed)"."""
    tier = answer.placement.activations or "device"
    where = next(name for name, tiers in columns(answer) if tier in tiers)
    return f"{where} {_treatment(answer)}".rstrip()


def updates_in_words(answer: Answer) -> str:
    """Say when updates run, and what part of the host's is done on the device."""
    streamed = answer.options.streamed_updates
    if streamed == 0:
        return f"overlap {answer.overlap}"
    part = "a measured share" if streamed == "auto" else fraction(float(streamed))
    return f"overlap {answer.overlap}, {part} of the host's on the device"


def mesh_in_words(sizes: Mapping[str, int]) -> str:
    """Write the ranks along each dimension of a mesh, but for those of one rank.

    Example:
        >>> mesh_in_words({"dp_replicate": 16, "dp_shard": 8, "tp": 1})
        'dp_replicate 16 x dp_shard 8'
    """
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


def waits_by_verb(answer: Answer) -> list[tuple[str, float]]:
    """Add up exposed waits by the first word of their cause: the longest first."""
    waits: defaultdict[str, float] = defaultdict(float)
    for cause, waited in answer.waits_s.items():
        waits[cause.split()[0] if cause.strip() else "other"] += waited
    return _largest(waits)


def _head(answer: Answer) -> list[str]:
    step = f"step {seconds(answer.step_s)} ({_range(answer)}){_tokens(answer)}" if answer.step_s else ""
    if answer.fits:
        return [f"fits: yes     {step}     bound by: {answer.bound_by}"]
    return [f"fits: no      {_lack(answer, lack)}" for lack in answer.lacks] + ([f"if it did: {step}"] if step else [])


def _wide_rows(answer: Answer) -> list[list[str]]:
    """Write the rows that are one text over all columns."""
    rows = [["updates", updates_in_words(answer)]]
    waits = waits_by_verb(answer)
    if waits:
        rest = ("others", sum(waited for _, waited in waits[_WAITS_SHOWN:]))
        shown = [(verb, waited) for verb, waited in (*waits[:_WAITS_SHOWN], rest) if waited]
        said = [f"{verb} {seconds(waited, beside=answer.step_s)}" for verb, waited in shown]
        rows.append(["waits exposed", ", ".join(said) or "none"])
    run = [answer.machine, answer.precision, f"stage {answer.stage}", answer.batch]
    if answer.world_size > 1:
        hosts = "" if answer.hosts == 1 else f" on {answer.hosts} hosts"
        copies = f", {mesh_in_words(answer.sizes)}" if answer.mesh else ""
        run.append(f"one of {answer.world_size} ranks{hosts}{copies}")
    rows.append(["planned for", ", ".join(word for word in run if word)])
    return rows


def _tail(answer: Answer) -> list[str]:
    shown = [_what_if(change, answer.step_s) for change in answer.what_ifs]
    return [" | ".join(shown)] if shown else []


def _what_if(change: WhatIf, step_s: float) -> str:
    """Write what a change would bring: "a second SSD -0.20 s"."""
    said = [change.name]
    if change.saved_s is not None:
        said.append(signed(-change.saved_s, beside=step_s))
    if change.tokens_share is not None:
        said.append(f"{share(change.tokens_share)} tokens/s")
    return " ".join(said)


def _lack(answer: Answer, lack: Shortfall) -> str:
    where = next(name for name, tiers in columns(answer) if lack.tier in tiers)
    change = lack.change.rstrip(".")
    what = f"{size(lack.bytes)} ({lack.bytes:,} bytes) too few on {'nvme' if where == 'nvme' else f'the {where}'}."
    return f"{what} Smallest change: {change}." if change else what


def _choices(answer: Answer) -> list[str]:
    """Say what the plan does: where state lives, and how a step goes."""
    state = "; ".join(f"{name} {home_in_words(answer, kind)}" for kind, name in STATE.items())
    return [state, f"activations {activations_in_words(answer)}; {updates_in_words(answer)}"]


def _beside(value: float | None, answer: Answer) -> str:
    return "-" if value is None else seconds(value, beside=answer.step_s)


def _differences(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Name what was measured and differs by more than it should. What the plan does not name it takes for idle."""
    step = max(predicted[STEP], measured.get(STEP, 0.0))
    lines = []
    for name in (name for name in dict.fromkeys([*predicted, *sorted(measured)]) if name in measured):
        planned, found = predicted.get(name, 0.0), measured[name]
        if abs(found - planned) <= max(DIFFERS * planned, 0.0 if name == STEP else MATTERS * step):
            continue
        than = f" ({share(found / planned - 1)})" if planned else ""
        both = [seconds(value, beside=step) for value in (found, planned)]
        lines.append(f"differs: {name}: {both[0]} measured, {both[1]} predicted{than}")
    return lines


def _activations(answer: Answer) -> list[str]:
    """Write where activations are, and behind the last of it what is done to them."""
    nbytes = answer.kind_bytes.get("activations", {})
    if not any(nbytes.values()):
        return [activations_in_words(answer)]
    cells = [size(found) if (found := bytes_in(nbytes, tiers)) else "-" for _, tiers in columns(answer)]
    while cells[-1] == "-":
        cells.pop()
    return [*cells[:-1], f"{cells[-1]} {_treatment(answer)}".rstrip()]


def _treatment(answer: Answer) -> str:
    return "(recomputed)" if answer.recompute else ""


def _peak(answer: Answer, tiers: Sequence[TierName]) -> str:
    peak = bytes_in(answer.peak_bytes, tiers)
    # The limit of one memory is not the sum of what each of its two names says.
    limits = [answer.limit_bytes[tier] for tier in tiers if tier in answer.limit_bytes]
    if not limits:
        return size(peak) if peak else "-"
    unit, scale = byte_unit(max(limits))
    if byte_unit(peak)[0] != unit:
        return f"{size(peak)} / {size(max(limits))}"
    return f"{digits(peak / scale)} / {digits(max(limits) / scale)} {unit}"


def _range(answer: Answer) -> str:
    _, scale = time_unit(answer.step_s)
    low, high = (digits(value / scale) for value in answer.step_range_s)
    return f"{low}-{high}"


def _tokens(answer: Answer) -> str:
    return f", {answer.tokens_per_s:,.0f} tokens/s" if answer.tokens_per_s else ""


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
