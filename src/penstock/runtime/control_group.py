"""The control group of the ranks, and the process groups of one engine."""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import EngineError, PenstockError, one_line
from penstock.runtime.finalizers import Phase, exiting
from penstock.runtime.modes import without_saved_hooks
from penstock.runtime.system import host_name, names_of_hosts
from penstock.runtime.topology import peers_of

# ----------------------------------------------------------------------------------------------------------------------
# Process groups of the engine, of the same ranks as those of the user.
#
# Ranks match the collectives of a group by their order on it. On its own group an engine's collectives are alone: those
# of a user's forward and of other engines do not come between (ordering rule 4).
#
# `torch.distributed.new_group` would not do, in torch 2.8 to 2.13. All ranks of the job have to call it, also those
# that have no engine. With `use_local_synchronization=True` its members alone do, and then
#
# - the name is made of the ranks and of the number of groups of the process. Ranks that have different numbers of
#   others look for each other under different names, and wait for ever
#   (`test_two_ranks_of_four_with_other_groups_beside_...`);
# - a group that is made after another one was destroyed gets that one's name, and looks for its ranks where the ranks
#   of that one were (`test_engines_in_turn_and_at_once_...`);
# - if the default group is bound to a device, NCCL splits its communicator, in which every rank of the job takes part:
#   the members wait for ever. This one needs several GPUs to be seen.
# ----------------------------------------------------------------------------------------------------------------------


# torch 2.13 renamed the flat collectives; the older names still work in torch 2.8 to 2.12.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_group(members: Sequence[int], like: dist.ProcessGroup, name: str, *, timeout_s: float) -> dist.ProcessGroup:
    """Make a group with the backends and the device of another one. Collective over its members alone.

    Options of a backend (`pg_options`, such as NCCL's stream priority) are not copied: torch has no way to read them.

    Arguments:
        members: the ranks of the job that are in it, in order; this one among them.
        like: the other one.
        name: a name that no group of these ranks ever had. Groups of other ranks may have it as well.
        timeout_s: how long a rank waits in a collective for the others, in seconds.

    Raises:
        RuntimeError: torch's, where another rank does not take part.
    """
    c10d: Any = dist.distributed_c10d  # torch does not type what it does not show
    default: Any = dist.group.WORLD
    backend, _ = c10d._world.pg_map[like]
    bound = like.bound_device_id
    # No split of the default group's communicator: ranks that are no members are not here to take part in it.
    before, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            backend,
            c10d._get_default_store(),
            f"{name} of {'_'.join(map(str, members))}",
            timeout=limit_of(timeout_s),
            device_id=bound,
            group_desc="penstock",
        )
    finally:
        default.bound_device_id = before
    c10d._world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return True if a group was not destroyed: `destroy_process_group()` of the user destroys all groups."""
    c10d: Any = dist.distributed_c10d
    return group in c10d._world.pg_map


def give_back(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy those of the groups that are still there.

    Do nothing at the exit of the interpreter: to end a communicator a rank waits for the others, which may have ended.
    """
    if not exiting(Phase.PROMISED):
        for group in groups:
            if is_alive(group):
                dist.destroy_process_group(group)


def limit_of(timeout_s: float) -> timedelta:
    """Write a timeout as torch takes it: at least a millisecond, at most three years, which a timedelta can hold."""
    return timedelta(seconds=min(max(timeout_s, 1e-3), 1e8))


# ----------------------------------------------------------------------------------------------------------------------
# The control group of the ranks: a gloo group of the engine, on the host, in which ranks compare the method that they
# are about to run.
#
# Every collective method begins with a meeting. Each rank sends a digest of the method and its facts, and a flag: 1 if
# it refuses. Only if all digests are equal, and no rank refuses, does any work begin in which one rank waits for
# another: a rank that refused alone would leave the others waiting until their timeout.
#
# Only if the 16 bytes differ do the ranks exchange texts, as JSON whose length is checked before memory is allocated
# for it. No data of another rank is ever executed.
# ----------------------------------------------------------------------------------------------------------------------


#: What ranks compare: values that JSON has, by a name that a message can show.
RankChecks = dict[str, Any]

_logger = logging.getLogger("penstock")

_MOST_BYTES = 1 << 28  # that one rank may say at once
_MOST_NAMED = 8  # ranks in one message
DEFAULT_TIMEOUT_S = 600.0
JOINING_S = 300.0  # the longest wait for all members to join, also where the timeout is longer
WARN_S = 60.0  # after which ranks that wait for others in `prepare` say whom they miss
HEARING_S = 5.0  # how long to wait for the other ranks' words once something has failed
#: How a forward of the model is called in messages: without, and with, a graph that autograd records.
FORWARDS = ("a forward without gradients", "a forward with gradients")
_ALONE = (
    " Run a forward on every rank, also an evaluation under `if rank == 0`. One rank alone may run it inside of "
    "`with optimizer.gathered():`, which every rank enters."
)
_INTERFACE = (
    "Ranks of several hosts find each other by GLOO_SOCKET_IFNAME: set it on each host to the name of its interface on "
    "the network between them. "
)


class ControlGroup:
    """A group of ranks that can agree, from any thread of theirs, while other collectives run.

    The group is made by gloo itself and is unknown to `torch.distributed`. That one names a group by its ranks: a group
    made after another of the same ranks was destroyed would get the old name, and look for its members where the
    members of the old group were.

    Arguments:
        members: the ranks of the job that belong to the control group. All of them construct it at the same time.
        rank: this process's index in `members`.
        timeout_s: how long to wait for the other members, in seconds; to join, `JOINING_S` at most.
        error: the class of the error that is raised when another member does not answer.
        advice: a sentence that is added to the message of that error.
        name: a name that all members know and that no control group had before; empty to have one chosen.
        hosts: the names of the members' hosts, if they are known and there are several.

    Attributes:
        timeout_s: the same as the argument.
        size: how many members there are.
        is_first: whether this rank is the one that speaks for all.

    Raises:
        PenstockError: of class `error`, when a member does not join in time.
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
        hosts: Sequence[str] | None = None,
    ) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.size, self.is_first = len(self.members), rank == 0
        self.timeout_s = timeout_s
        self._error = error
        self._advice = advice
        self._others: list[ControlGroup] = []  # control groups of the same ranks, which end with this one
        self._name = name
        self._hosts = hosts
        self._group: Any = None  # torch does not type what a backend does
        self._store: Any = None
        self._has_told = False
        if self.size > 1:
            self._join()

    def _join(self) -> None:
        """Meet the other members at the job's store, and make the group."""
        store = dist.distributed_c10d._get_default_store()
        if not self._name:
            who = ",".join(map(str, self.members))
            # Every rank counts the control groups of these members that it has joined. All have joined as many, so all
            # get the same number, and no earlier control group has it.
            number = store.add(f"penstock control groups of {who} joined by {self.members[self.rank]}", 1)
            self._name = f"penstock control group {number} of {hashlib.sha256(who.encode()).hexdigest()[:16]}"
        self._store = dist.distributed_c10d.PrefixStore(self._name, store)
        everyone = [f"here {rank}" for rank in range(self.size)]
        try:
            self._store.set(everyone[self.rank], host_name())
            # Wait here until all are present: inside gloo's constructor the store's own timeout would count, not ours.
            self._await(everyone)
            if self._hosts is None:  # now: when a message needs them, the host of the store may be the one that is gone
                self._hosts = names_of_hosts(self._store.multi_get(everyone))
            self._group = dist.ProcessGroupGloo(self._store, self.rank, self.size, _options(limit_of(self.timeout_s)))
        except PenstockError:  # it names who is missing; `EngineError` is a RuntimeError too
            raise
        except RuntimeError as error:
            if self._hosts:  # all are present, and cannot reach each other
                self._advice = _INTERFACE
            raise self._silence("prepare()", error) from error

    def _await(self, everyone: Sequence[str]) -> None:
        """Wait until every member has written its key; after a minute, log which have not."""
        patience_s = min(self.timeout_s, JOINING_S)
        first_s = min(WARN_S, patience_s / 2)
        missing = self._missing(everyone, first_s)
        if missing:
            _logger.warning(
                f"Rank {self.members[self.rank]} has waited {first_s:g} s in prepare() for {missing}, of "
                f"{self.size} ranks. It waits for {patience_s:g} s at most."
            )
            missing = self._missing(everyone, patience_s - first_s)
        if missing:
            raise self._error(
                f"Rank {self.members[self.rank]} of {self.size} waited {patience_s:g} s in prepare() for {missing}: "
                "ended, or not there yet. Look at the first error of those ranks. Ranks wait here for the smaller of "
                f"Options(timeout_s=) and {JOINING_S:g} s: where one comes later, call torch.distributed.barrier() "
                f"before prepare(). {self._advice}"
            )

    def _missing(self, everyone: Sequence[str], limit_s: float) -> str:
        """Wait until every member has written its key; name those that have not by then."""
        with contextlib.suppress(RuntimeError):  # the store's timeout
            self._store.wait(list(everyone), limit_of(limit_s))
            return ""
        absent = [rank for rank, key in zip(self.members, everyone, strict=True) if not self._store.check([key])]
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        named = ", ".join(map(str, absent[:_MOST_NAMED]))
        return f"rank{'s' * (len(absent) > 1)} {named}{more}" if absent else ""

    def named(self, rank: int) -> str:
        """Return how messages call a rank of the job: with the name of its host, where there are several."""
        return f"rank {rank}{self.host_of(rank)}"

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the job in brackets; empty if all are on one host, or the rank is no member."""
        return f" (host {self._hosts[self.members.index(rank)]})" if self._hosts and rank in self.members else ""

    def another(
        self, *, error: type[PenstockError], advice: str = "", timeout_s: float | None = None
    ) -> "ControlGroup":
        """Make a second control group of the same ranks, for use by another thread, or with more patience. Collective.

        Two threads must not share a control group: their messages would meet in an order of their own on each rank.

        Arguments:
            error: the class of the error that is raised when another member does not answer.
            advice: a sentence that is added to the message of that error.
            timeout_s: how long to wait for the other members, in seconds; `None`: as long as this control group.
        """
        name = f"{self._name}, {len(self._others) + 1}"
        patience = self.timeout_s if timeout_s is None else timeout_s
        control_group = ControlGroup(
            self.members, self.rank, timeout_s=patience, error=error, advice=advice, name=name, hosts=self._hosts
        )
        self._others.append(control_group)
        return control_group

    @contextmanager
    def together(self, verb: str, error: type[PenstockError] = EngineError) -> Iterator[RankChecks]:
        """Run the checks of a method in a `with` block; what one rank refuses in it, all refuse. Collective.

        Arguments:
            verb: the name of the method, for messages.
            error: the class of the error that is raised where the ranks' facts differ.

        Yields:
            An empty dict, to be filled with what has to be the same on all ranks.

        Raises:
            Exception: on the rank where the block raised it.
            EngineError: on the other ranks, with its text; and on all, where they have called different methods.
        """
        rank_checks: RankChecks = {}
        failure: Exception | None = None
        try:
            yield rank_checks
        except Exception as refusal:
            failure = refusal  # not raised yet: the others are about to wait for this rank in the meeting
        # Outside of the `try`: what the meeting raises is no refusal of this rank's.
        self._meet(verb, rank_checks, failure, error)

    def _meet(self, verb: str, rank_checks: RankChecks, failure: Exception | None, error: type[PenstockError]) -> None:
        """Compare the digests of what the ranks are about to do; exchange texts where they differ, and raise."""
        if self._group is None:
            if failure is not None:
                raise failure
            return
        said = hashlib.sha256(json.dumps([verb, rank_checks]).encode()).digest()
        own = torch.tensor([int.from_bytes(said[:8], signed=True), int(failure is not None)], device="cpu")
        try:
            numbers = [tuple(part.tolist()) for part in self._all_gather(own, verb)]
        except PenstockError:
            if failure is not None:
                raise failure from None  # the others are elsewhere; this rank would not have gone on
            raise
        # From here on every rank has the same numbers, so all take the same branches and meet again in them.
        if any(refused for _, refused in numbers):
            self.agree(failure, verb)
        if len(set(numbers)) > 1:
            self._name_difference(verb, rank_checks, error)

    def _name_difference(self, verb: str, rank_checks: RankChecks, error: type[PenstockError]) -> None:
        """Raise an error that says in what the ranks differ: the method, or the first fact."""
        # First the methods: ranks in different ones compare different facts, whose first difference would mislead.
        verbs = self.collect(verb)
        if len(set(verbs)) > 1:
            alone = _ALONE if set(verbs) & set(FORWARDS) else ""
            called = "; ".join(f"{self.named(rank)}: {other}" for rank, other in zip(self.members, verbs, strict=True))
            raise EngineError(
                f"Ranks are out of step: they have called different methods ({called}). Nothing was changed. Call "
                f"collective methods on every rank, in the same order.{alone}"
            )
        differences = self.collect(_first_difference(self.share(rank_checks), rank_checks))
        for rank, difference in zip(self.members, differences, strict=True):
            if difference is not None:
                name, there, here = difference
                raise error(
                    f"Ranks differ in {name}: {self.named(self.members[0])}: {there}; {self.named(rank)}: {here}. "
                    f"Nothing was changed: make it the same on every rank before {verb}."
                )

    def agree(self, failure: BaseException | None, verb: str = "") -> None:
        """Stop every rank where one has failed. Collective.

        Arguments:
            failure: what this rank has failed with, or `None`.
            verb: the name of the method, for the message.

        Raises:
            BaseException: `failure` itself, on the ranks that have one.
            PenstockError: on the others, with the class's name and the text of the first rank's failure.
        """
        # First tell the others, then raise: they wait here for this rank's word.
        said = self.collect(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        where = f" in {verb}" if verb else ""
        for rank, message in zip(self.members, said, strict=True):
            if message is not None:
                which = f"Rank {rank} of {self.size}{self.host_of(rank)}"
                raise self._error(f"{which} failed{where}, and this one stops with it. {message}")

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank. Collective. It is anything that JSON has.

        Raises:
            PenstockError: a rank has ended, or does something else.
        """
        if self._group is None:
            return value
        # Of one rank's word there is one copy on each: gathered, a plan would be there once for every rank.
        own = torch.frombuffer(bytearray(json.dumps(value if self.is_first else None).encode()), dtype=torch.uint8)
        # Every rank sends a length, so that a rank that is absent is noticed, as in all other meetings.
        length, *_ = self._all_gather(torch.tensor([own.numel()], device="cpu"))
        nbytes = _checked(int(length), self._error)
        said = own if self.is_first else torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        try:
            with without_saved_hooks():
                self._group.broadcast(said, 0).wait()
        except RuntimeError as error:
            raise self._silence("", error) from error
        return _parsed(said, self._error)

    def collect(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of `members`. Collective. It is anything that JSON has.

        Raises:
            PenstockError: a rank has ended, or does something else.
        """
        if self._group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self._all_gather(torch.tensor([own.numel()], device="cpu"))]
        for length in lengths:
            _checked(length, self._error)
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")  # gloo gathers parts of one length
        padded[: own.numel()] = own
        parts = self._all_gather(padded)
        return [_parsed(part[:length], self._error) for part, length in zip(parts, lengths, strict=True)]

    def _all_gather(self, own: Tensor, verb: str = "") -> list[Tensor]:
        """Exchange tensors of one shape; wait for every other rank, at most as long as the timeout."""
        parts = [torch.empty_like(own) for _ in self.members]
        try:
            with without_saved_hooks():
                self._group.allgather(parts, own).wait()
        except RuntimeError as error:
            raise self._silence(verb, error) from error
        return parts

    def _silence(self, verb: str, error: RuntimeError) -> PenstockError:
        """Make the error of a rank that waited in vain."""
        where, rank = f" in {verb}" if verb else "", self.members[self.rank]
        return self._error(
            f"Rank {rank} of {self.size}{self.host_of(rank)} hears nothing from another one{where}, which has ended or "
            f"does something else; {self.others_say(verb or 'a word between ranks')} {self._advice}({error})"
        )

    def tell(self, what: str) -> None:
        """Write to the job's store what this rank could not finish, or what ended it. The first text stays.

        A group in which a collective has failed carries nothing more; the store does.
        """
        if self._store is not None and not self._has_told:
            self._has_told = True
            with contextlib.suppress(RuntimeError):  # the rank that has the store has ended
                self._store.set(_stopped(self.members[self.rank]), one_line(what, 300))

    def others_say(self, what: str) -> str:
        """Write to the store what this rank could not finish. Return what every other rank has written, for a message.

        Waits `HEARING_S` at most. The text names the ranks that wrote nothing, and ends with what to do next.
        """
        self.tell(f"could not finish {what}")
        # A rank that is stuck in another collective finds out later than this one: give all of them some seconds.
        ends = time.monotonic() + min(HEARING_S, self.timeout_s)
        others = [rank for rank in self.members if rank != self.members[self.rank]]
        said = [f"{self.named(rank)} {self._word(rank, ends - time.monotonic())}" for rank in others[:_MOST_NAMED]]
        if len(others) > _MOST_NAMED:
            said.append("others are not asked")
        return (
            f"{'; '.join(said)}. Look at the first error of a rank that has ended. Ranks wait for {self.timeout_s:g} s "
            "at most: Options(timeout_s=)."
        )

    def _word(self, rank: int, patience_s: float) -> str:
        """Return what a rank has written to the store, or writes in time."""
        with contextlib.suppress(RuntimeError):  # it tells nothing, or the store is gone
            self._store.wait([_stopped(rank)], limit_of(patience_s))
            word: str = self._store.get(_stopped(rank)).decode()
            return word
        return "says nothing: it has ended, or runs something else"

    def close(self) -> None:
        """Destroy the group, and those of the control groups that `another` made."""
        for control_group in self._others:
            control_group.close()
        self._group = None


def _stopped(rank: int) -> str:
    return f"stopped {rank}"


def _options(timeout: timedelta) -> Any:
    """Make gloo's default options, with connections that are made when they are first used.

    By default each member connects to every other one. Messages go around in a ring, or down a tree: of a thousand
    ranks a member talks to about twenty, and has no thousand descriptors for each control group.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name, lazy_init=True) for name in named]
    options._devices = devices or [gloo.create_default_device(lazy_init=True)]
    options._threads = 2 * max(1, len(devices))
    return options


def _checked(nbytes: int, error: type[PenstockError]) -> int:
    """Refuse the length of a message that is none, before anything of that length is allocated.

    A rank that sends something else than is expected may have sent any number.
    """
    if not 0 < nbytes <= _MOST_BYTES:
        raise error(f"A rank is about to say {nbytes:,} bytes: it is not what it should be.")
    return nbytes


def _parsed(said: Tensor, error: type[PenstockError]) -> Any:
    """Read a rank's words."""
    try:
        return json.loads(said.numpy().tobytes())
    except (ValueError, RecursionError) as why:
        raise error(f"A rank says what cannot be read: it is not what it should be. ({why})") from why


def _first_difference(first: Mapping[str, Any], own: RankChecks) -> tuple[str, str, str] | None:
    """Find the first fact that is not the same here as on the first rank: its name, the value there, the value here."""
    own = json.loads(json.dumps(own))  # as the first rank's have come: tuples are lists, keys are strings
    for name in (*first, *own):
        there, here = (json.dumps(rank_checks[name]) if name in rank_checks else "none" for rank_checks in (first, own))
        if there != here:
            return name, there, here
    return None


def control_group_of_all(*, timeout_s: float, error: type[PenstockError]) -> ControlGroup:
    """Make the control group of the default process group's ranks, where agreeing is all that they do. Collective."""
    peers = peers_of(None, sharded=True)
    return ControlGroup(peers.members, peers.members.index(peers.rank), timeout_s=timeout_s, error=error)
