"""Ranks that agree: over a group of their own, on the host, on any thread, while other collectives run.

Every collective method begins with a meeting: each rank says what it is about to do, and whether it refuses. Only when
all are about to do the same, and none refuses, does anything begin that would leave a rank waiting. What ranks say goes
as numbers first, and as JSON only where those differ: nothing that another rank sends is ever run.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import EngineError, PenstockError

#: What is compared: names, and values that JSON has.
Facts = dict[str, Any]

_MOST_BYTES = 1 << 28  # of what one rank says
DEFAULT_TIMEOUT_S = 600.0


class Council:
    """Ranks that agree.

    The group is none of `torch.distributed`'s: those of the same ranks get the same name again once one was destroyed,
    and would look for each other where the ranks of that one were.

    Arguments:
        members: ranks of the job, in the order of their numbers here. All of them make it at once.
        rank: this one's number among them.
        timeout_s: how long the others are waited for.
        error: raised where one of them says nothing.
        advice: added to its message.
    """

    def __init__(
        self,
        members: Sequence[int] = (0,),
        rank: int = 0,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        error: type[PenstockError] = EngineError,
        advice: str = "",
        name: str = "",
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        self._timeout_s = timeout_s
        self._error = error
        self._advice = advice
        self._others: list[Council] = []  # of the same ranks
        self._name = name
        self._group: Any = None  # torch does not type what a backend does
        if self.size > 1:
            self._join()

    def _join(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        if not self._name:
            who = ",".join(map(str, self.members))
            # Each rank counts its own: all make as many.
            number = store.add(f"penstock councils of {who} joined by {self.members[self.rank]}", 1)
            self._name = f"penstock council {number} of {hashlib.sha256(who.encode()).hexdigest()[:16]}"
        prefixed = dist.distributed_c10d.PrefixStore(self._name, store)
        limit = timedelta(seconds=min(self._timeout_s, 1e8))  # a timedelta's own limit is not far beyond
        try:
            prefixed.set(f"here {self.rank}", "")  # gloo waits for who is not, for as long as the store likes
            prefixed.wait([f"here {rank}" for rank in range(self.size)], limit)
            self._group = dist.ProcessGroupGloo(prefixed, self.rank, self.size, limit)
        except RuntimeError as error:
            raise self._silence("prepare()", error) from error

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.members)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def another(self, *, error: type[PenstockError], advice: str = "") -> "Council":
        """One more of the same ranks, for another thread. Collective."""
        name = f"{self._name}, {len(self._others) + 1}"
        council = Council(self.members, self.rank, timeout_s=self._timeout_s, error=error, advice=advice, name=name)
        self._others.append(council)
        return council

    @contextmanager
    def together(self, verb: str, error: type[PenstockError] = EngineError) -> Iterator[Facts]:
        """What a method checks before it begins: what one rank refuses in the block, all refuse. Collective.

        Arguments:
            verb: the method, in messages.
            error: what is raised where ranks differ.

        Returns:
            A context manager that gives a dict, for what has to be the same on all ranks.

        Raises:
            Exception: what was raised in the block, on the rank where it was.
            EngineError: on the others, which quotes it; and on all, where they are at different methods.
        """
        facts: Facts = {}
        failure: Exception | None = None
        try:
            yield facts
        except Exception as refusal:
            failure = refusal
        self._meet(verb, facts, failure, error)

    def _meet(self, verb: str, facts: Facts, failure: Exception | None, error: type[PenstockError]) -> None:
        if self._group is None:
            if failure is not None:
                raise failure
            return
        said = hashlib.sha256(json.dumps([verb, facts]).encode()).digest()
        own = torch.tensor([int.from_bytes(said[:8], signed=True), int(failure is not None)], device="cpu")
        try:
            numbers = [tuple(part.tolist()) for part in self._all_gather(own, verb)]
        except PenstockError:
            if failure is not None:
                raise failure from None  # the others are elsewhere; this rank would not have gone on
            raise
        if any(refused for _, refused in numbers):
            self.agree(failure, verb)
        if len(set(numbers)) > 1:
            self._name_difference(verb, facts, error)

    def _name_difference(self, verb: str, facts: Facts, error: type[PenstockError]) -> None:
        verbs = self.collect(verb)
        if len(set(verbs)) > 1:
            called = "; ".join(f"rank {rank}: {other}" for rank, other in zip(self.members, verbs, strict=True))
            raise EngineError(
                f"Ranks are out of step: they have called different methods ({called}). Nothing was changed. Call "
                "collective methods on every rank, in the same order."
            )
        differences = self.collect(_first_difference(self.share(facts), facts))
        for rank, difference in zip(self.members, differences, strict=True):
            if difference is not None:
                name, there, here = difference
                raise error(
                    f"Ranks differ in {name}: rank {self.members[0]}: {there}; rank {rank}: {here}. Nothing was "
                    f"changed: make it the same on every rank before {verb}."
                )

    def agree(self, failure: BaseException | None, verb: str = "") -> None:
        """Raise where any rank has failed: its own error there, and on the others an error that quotes the first.

        Collective.
        """
        said = self.collect(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        where = f" in {verb}" if verb else ""
        for rank, message in zip(self.members, said, strict=True):
            if message is not None:
                raise self._error(f"Rank {rank} of {self.size} failed{where}, and this one stops with it. {message}")

    def share(self, value: Any) -> Any:
        """What the first rank has: anything that JSON has."""
        return self.collect(value)[0]

    def collect(self, value: Any) -> list[Any]:
        """What each rank has, by number: anything that JSON has.

        Raises:
            PenstockError: a rank has ended, or does something else.
        """
        if self._group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._all_gather(torch.tensor([own.numel()], device="cpu"))]
        if not 0 < min(lengths) <= max(lengths) <= _MOST_BYTES:
            raise self._error(f"A rank is about to say {max(lengths):,} bytes: it is not what it should be.")
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        parts = self._all_gather(padded)
        try:
            return [json.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]
        except (ValueError, RecursionError) as error:
            raise self._error(f"A rank says what cannot be read: it is not what it should be. ({error})") from error

    def _all_gather(self, own: Tensor, verb: str = "") -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in self.members]
        try:
            self._group.allgather(parts, own).wait()
        except RuntimeError as error:
            raise self._silence(verb, error) from error
        return parts

    def _silence(self, verb: str, error: RuntimeError) -> PenstockError:
        where = f" in {verb}" if verb else ""
        return self._error(
            f"Rank {self.members[self.rank]} of {self.size} hears nothing from another one{where}, which has ended or "
            f"does something else. It waits for {self._timeout_s:g} s at most: Options(timeout_s=). "
            f"{self._advice}({error})"
        )

    def close(self) -> None:
        """Give the groups back."""
        for council in self._others:
            council.close()
        self._group = None


def _first_difference(first: Mapping[str, Any], own: Facts) -> tuple[str, str, str] | None:
    """Where what this rank says is not what the first one says: the name, and both values."""
    own = json.loads(json.dumps(own))  # as the first one's came
    for name in (*first, *own):
        there, here = (_shown(facts, name) for facts in (first, own))
        if there != here:
            return name, there, here
    return None


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return json.dumps(facts[name]) if name in facts else "none"
