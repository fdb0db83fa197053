"""A plan in words: the table of a plan, why it is as it is, and what was predicted beside what was measured."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.forecast.answer import Answer, Lack, WhatIf
from penstock.kinds import TierName

#: Above which share a measured time is said to differ from the predicted one.
DIFFERS = 0.15
#: Below which share of a step a resource's difference is not worth a line.
MATTERS = 0.01
STEP = "step"

_WAITS_SHOWN = 3
_NAMES: Mapping[str, str] = {"params": "params", "grads": "gradients", "optimizer": "optimizer"}
_HOMES: Mapping[str, str] = {"device": "device", "cpu": "host", "nvme": "nvme"}
_HEAD_CHARS, _GAP = 16, "    "
_BYTE_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

#: A column of the table, and the tiers that it is of: of a cpu, device and host are one memory.
Column = tuple[str, tuple[TierName, ...]]


def table(answer: Answer, *, run: str = "") -> str:
    """Write a plan as a table.

    Arguments:
        answer: the plan.
        run: the command that does what it says; empty for none.
    """
    rows = [_row("", [name for name, _ in columns(answer)]), *state_rows(answer)]
    rows += _wide_rows(answer)
    lines = [*_head(answer), *_aligned(rows), *_tail(answer)]
    if answer.fits:
        lines.append(_gap(answer) + (f"     run: {run}" if run else ""))
    lines += [f"may round otherwise: {note}" for note in answer.rounding_notes]
    return "\n".join(line.rstrip() for line in lines)


def explain(answer: Answer) -> str:
    """Write for each choice of a plan what the next best one would have cost, and why."""
    if not answer.why:
        return "The plan says nothing about its choices: they were given."
    rows = [["choice", "chosen", "next best", "would cost"]]
    for reason in answer.why:
        cost = "does not fit" if reason.cost_s is None else signed(reason.cost_s)
        rows.append([reason.choice, reason.chosen, reason.next_best, cost])
    head, *lines = _aligned(rows)
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
    lines = [head, f"      {_choices(answer)}"]
    if measured is None:
        return "\n".join([*lines, *_aligned([[f"  {name}", seconds(value)] for name, value in predicted.items()])])
    rows = [["", "predicted", "measured", ""]]
    for name in dict.fromkeys([*predicted, *sorted(measured)]):
        planned, found = predicted.get(name), measured.get(name)
        change = share(found / planned - 1) if planned and found is not None else ""
        rows.append([f"  {name}", *("-" if value is None else seconds(value) for value in (planned, found)), change])
    return "\n".join([*lines, *_aligned(rows), *_differences(predicted, measured)])


def lacks_in_words(answer: Answer) -> str:
    """Say what is missing for a plan, on which tier, and what to do: a sentence or two for each tier."""
    return " ".join(_lack(answer, lack) for lack in answer.lacks)


def size(nbytes: int) -> str:
    """Write bytes in a unit that is fit for them, with three digits."""
    unit, scale = _byte_unit(nbytes)
    return f"{_digits(nbytes / scale) if scale > 1 else nbytes} {unit}"


def seconds(value: float) -> str:
    """Write seconds in a unit that is fit for them, with three digits."""
    unit, scale = _time_unit(value)
    return f"{_digits(value / scale)} {unit}"


def signed(value: float) -> str:
    """Write a difference of seconds, with its sign."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def share(value: float) -> str:
    """Write a difference as a share, in percent with its sign."""
    return f"{value:+,.0%}".replace("%", " %")


def fraction(value: float) -> str:
    """Write a tier's fraction of a kind with two digits, which never hide that there is something, or not all."""
    if 0 < value < 0.01:
        return "<.01"
    return ">.99" if 0.99 < value < 1 else f"{value:.2f}"


def columns(answer: Answer) -> list[Column]:
    """Name the columns of memory, and the tiers of each."""
    if answer.device == "cpu":
        return [("host", ("device", "cpu")), ("nvme", ("nvme",))]
    return [("device", ("device",)), ("host", ("cpu",)), ("nvme", ("nvme",))]


def state_rows(answer: Answer) -> list[list[str]]:
    """Write the rows of the three kinds of state, of activations, and of the peak beside its limit."""
    rows = []
    for kind, name in _NAMES.items():
        home = {tier.value: part for tier, part in answer.placement.home(kind).items()}
        cells = []
        for _, tiers in columns(answer):
            part = sum(home.get(tier, 0.0) for tier in tiers)
            nbytes = _bytes_of(answer.kind_bytes.get(kind, {}), tiers)
            # Homes that make 1 together do so to within 1e-6.
            text = fraction(1.0 if part > 1 - 1e-6 else part)
            cells.append(" ".join([text, *([size(nbytes)] if nbytes else [])]) if part else "-")
        rows.append(_row(name, cells))
    rows.append(_row("activations", [*_activations(answer), activations_in_words(answer)]))
    rows.append(_row("peak / limit", [_peak(answer, tiers) for _, tiers in columns(answer)]))
    return rows


def activations_in_words(answer: Answer) -> str:
    """Say what is done to activations: "(recomputed, 2 slices)"; empty for nothing."""
    said = ["recomputed"] if answer.recompute else []
    if answer.unit_micro_batches > 1:
        said.append(f"{answer.unit_micro_batches} slices")
    return f"({', '.join(said)})" if said else ""


def updates_in_words(answer: Answer) -> str:
    """Say when updates run, and what part of the host's is done on the device."""
    streamed = answer.options.streamed_updates
    if streamed == 0:
        return f"overlap {answer.overlap}"
    part = "a measured share" if streamed == "auto" else fraction(float(streamed))
    return f"overlap {answer.overlap}, {part} of the host's on the device"


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
        shown = [f"{verb} {seconds(waited)}" for verb, waited in waits[:_WAITS_SHOWN] if waited]
        rest = sum(waited for _, waited in waits[_WAITS_SHOWN:])
        rows.append(["waits exposed", ", ".join([*shown, *([f"others {seconds(rest)}"] if rest else [])]) or "none"])
    run = [answer.machine, answer.precision, f"stage {answer.stage}", answer.batch]
    if answer.world_size > 1:
        hosts = "" if answer.hosts == 1 else f" on {answer.hosts} hosts"
        run.append(f"one of {answer.world_size} ranks{hosts}")
    rows.append(["planned for", ", ".join(word for word in run if word)])
    return rows


def _tail(answer: Answer) -> list[str]:
    shown = [what_if(change) for change in answer.what_ifs]
    return [" | ".join(shown)] if shown else []


def what_if(change: WhatIf) -> str:
    """Write what a change would bring: "a second SSD -0.2 s"."""
    said = [change.name]
    if change.saved_s is not None:
        said.append(signed(-change.saved_s))
    if change.tokens_share is not None:
        said.append(f"{share(change.tokens_share)} tokens/s")
    return " ".join(said)


def _gap(answer: Answer) -> str:
    # Rounded first: 7 % as a float is a little more than 7.
    return f"within {max(1, math.ceil(round(answer.gap * 100, 6))):,} % of the best possible."


def _lack(answer: Answer, lack: Lack) -> str:
    where = "host" if answer.device == "cpu" and lack.tier == "device" else _HOMES[lack.tier]
    change = lack.change.rstrip(".")
    what = f"{size(lack.bytes)} ({lack.bytes:,} bytes) too few on {'nvme' if where == 'nvme' else f'the {where}'}."
    return f"{what} Smallest change: {change}." if change else what


def _choices(answer: Answer) -> str:
    """Say in one line what the plan does."""
    said = []
    for kind, name in _NAMES.items():
        home = [(_HOMES[tier.value], part) for tier, part in answer.placement.home(kind).items()]
        said.append(f"{name} {' + '.join(where if part == 1 else f'{fraction(part)} {where}' for where, part in home)}")
    where = answer.placement.activations
    activations = activations_in_words(answer).strip("()")
    said.append(f"activations {_HOMES[where] if where else 'device'}{', ' if activations else ''}{activations}")
    return "; ".join([*said, updates_in_words(answer)])


def _differences(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    step = max(predicted[STEP], measured.get(STEP, 0.0))
    lines = []
    for name, planned in predicted.items():
        found = measured.get(name)
        if found is None or abs(found - planned) <= max(DIFFERS * planned, 0.0 if name == STEP else MATTERS * step):
            continue
        than = f" ({share(found / planned - 1)})" if planned else ""
        took = "the step took" if name == STEP else f"{name} was busy for"
        lines.append(f"differs: {took} {seconds(found)}, not {seconds(planned)}{than}")
    return lines


def _activations(answer: Answer) -> list[str]:
    nbytes = answer.kind_bytes.get("activations", {})
    return [size(found) if (found := _bytes_of(nbytes, tiers)) else "-" for _, tiers in columns(answer)]


def _peak(answer: Answer, tiers: Sequence[TierName]) -> str:
    peak = _bytes_of(answer.peak_bytes, tiers)
    # The limit of one memory is not the sum of what each of its two names says.
    limits = [answer.limit_bytes[tier] for tier in tiers if tier in answer.limit_bytes]
    if not limits:
        return size(peak) if peak else "-"
    unit, scale = _byte_unit(max(peak, *limits))
    return f"{_digits(peak / scale)} / {_digits(max(limits) / scale)} {unit}"


def _bytes_of(by_tier: Mapping[TierName, int], tiers: Iterable[TierName]) -> int:
    return sum(by_tier.get(tier, 0) for tier in tiers)


def _range(answer: Answer) -> str:
    _, scale = _time_unit(answer.step_s)
    low, high = (_digits(value / scale) for value in answer.step_range_s)
    return f"{low}-{high}"


def _tokens(answer: Answer) -> str:
    return f", {answer.tokens_per_s:,.0f} tokens/s" if answer.tokens_per_s else ""


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: (-item[1], item[0]))


def _byte_unit(nbytes: int) -> tuple[str, int]:
    return next(((unit, scale) for unit, scale in _BYTE_UNITS if nbytes >= scale), _BYTE_UNITS[-1])


def _time_unit(value: float) -> tuple[str, float]:
    return next(
        ((unit, scale) for unit, scale in _TIME_UNITS if value >= scale), ("s", 1.0) if not value else ("us", 1e-6)
    )


def _digits(value: float) -> str:
    """Write a number that is not negative with three digits, or with all that stand before the point."""
    if value == 0:
        return "0"
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def _row(name: str, cells: Iterable[str]) -> list[str]:
    return [name, *cells]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns. The last cell of a row may be as long as it likes."""
    widths: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        for number, cell in enumerate(row[:-1]):
            widths[number] = max(widths[number], len(cell))
    return [_GAP.join([*(cell.ljust(widths[n]) for n, cell in enumerate(row[:-1])), row[-1]]).rstrip() for row in rows]
