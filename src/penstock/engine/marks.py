"""What a trace's file has beside its rows: where steps of the optimizer end, and the bytes on each tier."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.trace import Recording

STEP = "step"


def marks_of(recording: Recording, rank: int) -> Iterator[dict[str, Any]]:
    """Write events for a viewer: an instant where each step returned, and a counter for each tier.

    A counter has a value where its bytes change, and at the end, up to which the last one holds.
    """

    def at(when: float) -> float:
        return (when - recording.start) * 1e6

    for number, when in enumerate(recording.steps, 1):
        yield {"ph": "i", "s": "p", "pid": rank, "tid": 0, "name": f"{STEP} {number}", "cat": STEP, "ts": at(when)}
    tiers = list(dict.fromkeys(tier for _, sizes in recording.sizes for tier in sizes))
    last: Mapping[str, int] = {}
    for when, sizes in (*recording.sizes, *((recording.stop, sizes) for _, sizes in recording.sizes[-1:])):
        for tier in tiers:
            if sizes.get(tier, 0) != last.get(tier) or when == recording.stop:
                value = {"bytes": sizes.get(tier, 0)}
                yield {"ph": "C", "pid": rank, "name": f"bytes on {tier}", "ts": at(when), "args": value}
        last = {tier: sizes.get(tier, 0) for tier in tiers}
