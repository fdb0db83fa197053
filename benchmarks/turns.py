"""Contenders in processes of their own that take turns: a noisy machine disturbs all of them alike.

Each contender is a generator function: set up, then yield after every turn with a dict of figures. The parent asks one
after the other for a turn, round by round, and compares them round by round.
"""

import multiprocessing as mp
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Figures = dict[str, float]
Contender = Callable[..., Iterator[Figures]]


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, warmup: int, environment: Mapping[str, str], **settings: Any
) -> dict[str, list[Figures]]:
    """Run every contender for `warmup + rounds` turns; returns the figures of the counted ones.

    A contender that fails is left out, and its error printed.
    """
    context = mp.get_context("spawn")
    running = {}
    os.environ.update(environment)  # children inherit it; malloc reads it at their start
    for name, contender in contenders.items():
        mine, theirs = context.Pipe()
        process = context.Process(target=_run, args=(contender, theirs, settings), daemon=True)
        process.start()
        running[name] = (mine, process)
        if not _receive(name, mine):  # set up one by one: peaks of set-up do not meet
            del running[name]
    figures: dict[str, list[Figures]] = {name: [] for name in running}
    for turn in range(warmup + rounds):
        for name, (pipe, _) in list(running.items()):
            pipe.send("counted" if turn >= warmup else "warm-up")
            found = _receive(name, pipe)
            if not found:
                del running[name], figures[name]
            elif turn >= warmup:
                figures[name].append(found)
    for pipe, process in running.values():
        pipe.send(None)
        process.join()
    return figures


def medians(figures: list[Figures]) -> Figures:
    """The median of each figure."""
    return {key: statistics.median(f[key] for f in figures) for key in figures[0]}


def paired_ratio(figures: dict[str, list[Figures]], name: str, base: str, key: str) -> float:
    """Median over the rounds of name / base."""
    return statistics.median(a[key] / b[key] for a, b in zip(figures[name], figures[base], strict=True))


def _receive(name: str, pipe: Any) -> Any:
    try:
        kind, value = pipe.recv()
    except EOFError:
        kind, value = "error", "the process died"
    if kind == "error":
        print(f"{name} is left out: {value}")
        return None
    return value


def _run(contender: Contender, pipe: Any, settings: dict[str, Any]) -> None:
    try:
        turns = contender(**settings)
        next(turns)
        pipe.send(("ready", True))
        while (message := pipe.recv()) is not None:
            pipe.send(("figures", turns.send(message)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
